//! The rewriting of a kernel's statements and expressions.

use proc_macro2::TokenStream;
use quote::{quote, quote_spanned};
use syn::spanned::Spanned;
use syn::visit_mut::{self, VisitMut};
use syn::{
    BinOp, Block, Error, Expr, ExprAssign, ExprBinary, ExprIndex, Result, ReturnType, Stmt,
    parse_quote_spanned,
};

/// Rewrites the body of a function in place; its last expression is a value if the function returns
/// one.
pub(crate) fn rewrite(block: &mut Block, output: &ReturnType) -> Result<()> {
    let mut rewriter = Rewriter { errors: None, statement: false };
    match output {
        ReturnType::Default => rewriter.unit_block(block),
        ReturnType::Type(..) => rewriter.visit_block_mut(block),
    }
    rewriter.errors.map_or(Ok(()), Err)
}

struct Rewriter {
    errors: Option<Error>,
    /// Whether the expression about to be visited stands as a statement, its value unused.
    statement: bool,
}

impl Rewriter {
    fn refuse(&mut self, at: impl Spanned, why: &str) {
        let error = Error::new(at.span(), why);
        match &mut self.errors {
            Some(all) => all.combine(error),
            None => self.errors = Some(error),
        }
    }

    /// A block whose value is not used: its last expression is a statement like the others.
    fn unit_block(&mut self, block: &mut Block) {
        for statement in &mut block.stmts {
            self.unit_statement(statement);
        }
    }

    fn unit_statement(&mut self, statement: &mut Stmt) {
        let Stmt::Expr(expr, semicolon) = statement else {
            return self.visit_stmt_mut(statement);
        };
        self.statement = true;
        self.visit_expr_mut(expr);
        self.statement = false;
        // A call in place of a block needs the semicolon that a block does without.
        if matches!(expr, Expr::Call(_) | Expr::MethodCall(_)) {
            *semicolon = Some(Default::default());
        }
    }

    /// An `if` as a statement.
    fn branch(&mut self, choice: &mut syn::ExprIf) -> Option<Expr> {
        // `if let` matches on what is known while building.
        if has_let(&choice.cond) {
            self.visit_block_mut(&mut choice.then_branch);
            if let Some((_, other)) = &mut choice.else_branch {
                self.visit_expr_mut(other);
            }
            return None;
        }
        let span = choice.if_token.span;
        self.visit_expr_mut(&mut choice.cond);
        self.unit_block(&mut choice.then_branch);
        let otherwise: TokenStream = match &mut choice.else_branch {
            None => quote!({}),
            Some((_, other)) => {
                match &mut **other {
                    Expr::Block(block) => self.unit_block(&mut block.block),
                    other => {
                        self.statement = true;
                        self.visit_expr_mut(other);
                    }
                }
                quote!({ #other; })
            }
        };
        let (cond, then) = (&choice.cond, &choice.then_branch);
        Some(parse_quote_spanned!(span=>
            ::tile::dsl::test(#cond).then(|| #then).otherwise(|| #otherwise)
        ))
    }
}

/// Whether the last statement of a block may be its value: an `if` that is not followed by `else`
/// has none.
fn is_value(last: &Stmt) -> bool {
    match last {
        Stmt::Expr(Expr::If(choice), None) => choice.else_branch.is_some(),
        Stmt::Expr(_, None) => true,
        _ => false,
    }
}

fn has_let(cond: &Expr) -> bool {
    match cond {
        Expr::Let(_) => true,
        Expr::Binary(b) => has_let(&b.left) || has_let(&b.right),
        _ => false,
    }
}

/// The right side is a closure: between plain truths it is not always run.
fn connective(op: &BinOp) -> Option<&'static str> {
    Some(match op {
        BinOp::And(_) => "both",
        BinOp::Or(_) => "either",
        _ => return None,
    })
}

fn comparison(op: &BinOp) -> Option<&'static str> {
    Some(match op {
        BinOp::Eq(_) => "eq",
        BinOp::Ne(_) => "ne",
        BinOp::Lt(_) => "lt",
        BinOp::Le(_) => "le",
        BinOp::Gt(_) => "gt",
        BinOp::Ge(_) => "ge",
        _ => return None,
    })
}

fn compound(op: &BinOp) -> Option<TokenStream> {
    Some(match op {
        BinOp::AddAssign(_) => quote!(+),
        BinOp::SubAssign(_) => quote!(-),
        BinOp::MulAssign(_) => quote!(*),
        BinOp::DivAssign(_) => quote!(/),
        BinOp::BitOrAssign(_) => quote!(|),
        BinOp::BitAndAssign(_) => quote!(&),
        BinOp::BitXorAssign(_) => quote!(^),
        _ => return None,
    })
}

impl VisitMut for Rewriter {
    fn visit_block_mut(&mut self, block: &mut Block) {
        // The last expression may be the block's value; all before it are statements.
        let last = block.stmts.len().saturating_sub(1);
        for (i, statement) in block.stmts.iter_mut().enumerate() {
            if i == last && is_value(statement) {
                visit_mut::visit_stmt_mut(self, statement);
            } else {
                self.unit_statement(statement);
            }
        }
    }

    fn visit_expr_mut(&mut self, expr: &mut Expr) {
        let statement = std::mem::replace(&mut self.statement, false);
        let span = expr.span();
        match expr {
            Expr::If(choice) if statement => {
                if let Some(call) = self.branch(choice) {
                    *expr = call;
                }
            }
            Expr::ForLoop(each) => {
                if let Some(label) = &each.label {
                    self.refuse(label, "a kernel's loops have no labels");
                }
                self.visit_expr_mut(&mut each.expr);
                self.unit_block(&mut each.body);
                let (over, item, body) = (&each.expr, &each.pat, &each.body);
                *expr = parse_quote_spanned!(span=> ::tile::dsl::each(#over, |#item| #body));
            }
            Expr::While(_) | Expr::Loop(_) => {
                self.refuse(&*expr, "a kernel loops with `for i in range(a, b)`");
            }
            Expr::Break(_) | Expr::Continue(_) => {
                self.refuse(&*expr, "a kernel's loops run to their end: guard the rest with `if`");
            }
            Expr::Return(_) => {
                self.refuse(&*expr, "a kernel does not return early: guard the rest with `if`")
            }
            Expr::Assign(ExprAssign { left, right, .. }) => {
                self.visit_expr_mut(right);
                let call: Expr = match &mut **left {
                    Expr::Index(ExprIndex { expr: array, index, .. }) => {
                        self.visit_expr_mut(array);
                        self.visit_expr_mut(index);
                        parse_quote_spanned!(span=> ::tile::dsl::put(&#array, #index, #right))
                    }
                    Expr::Infer(_) => return,
                    // The value first: it may read the target.
                    target => parse_quote_spanned!(span=> {
                        let value = #right;
                        ::tile::dsl::assign(&mut #target, value)
                    }),
                };
                *expr = call;
            }
            Expr::Binary(ExprBinary { left, op, right, .. }) => {
                self.visit_expr_mut(right);
                if let (Some(op), Expr::Index(ExprIndex { expr: array, index, .. })) =
                    (compound(op), &mut **left)
                {
                    self.visit_expr_mut(array);
                    self.visit_expr_mut(index);
                    *expr = parse_quote_spanned!(span=> {
                        let index = #index;
                        ::tile::dsl::put(&#array, index, ::tile::dsl::at(&#array, index) #op (#right))
                    });
                    return;
                }
                self.visit_expr_mut(left);
                if let Some(method) = connective(op) {
                    let method = syn::Ident::new(method, op.span());
                    let right = match &**right {
                        Expr::Paren(inner) => &*inner.expr,
                        other => other,
                    };
                    *expr =
                        parse_quote_spanned!(span=> ::tile::dsl::Truth::#method(#left, || #right));
                } else if let Some(method) = comparison(op) {
                    let method = syn::Ident::new(method, op.span());
                    *expr = parse_quote_spanned!(span=> ::tile::dsl::Order::#method(#left, #right));
                }
            }
            Expr::Index(ExprIndex { expr: array, index, .. }) => {
                self.visit_expr_mut(array);
                self.visit_expr_mut(index);
                let call = quote_spanned!(span=> ::tile::dsl::at(&#array, #index));
                *expr = Expr::Verbatim(call);
            }
            other => visit_mut::visit_expr_mut(self, other),
        }
    }
}
