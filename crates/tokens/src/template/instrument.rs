//! A parsed template in which every operation that makes a value is one of ours.
//!
//! `a + b`, `a * b` and `a ~ b` become filters that know the [`Budget`](super::budget::Budget);
//! literals of lists and maps go through one that does; so do arguments that are spread, and what
//! is put into a namespace. Text between tags becomes `{{ 'text' }}`, which reaches our printer,
//! whatever captures it. Filters, functions and methods are ours by name (`filters.rs`,
//! `methods.rs`). Slices become a filter, as negative steps over what is empty are out of bounds in
//! MiniJinja 3.0 and a slice of a list is a list in Python; loops go over what a filter lets
//! through, which refuses `none` as Python does. What is compared or searched is counted too, for
//! the time that takes.
//!
//! Filters are called by names that no template can set a variable to. A syntax tree cannot be
//! changed in place, so it is copied.

use minijinja::Value;
use minijinja::machinery::Span;
use minijinja::machinery::ast::{
    AutoEscape, BinOp, BinOpKind, Block, Break, Call, CallArg, CallBlock, Compare, CompareOp,
    Const, Continue, Do, EmitExpr, Expr, Extends, Filter, FilterBlock, ForLoop, FromImport,
    GetAttr, GetItem, IfCond, IfExpr, Import, Include, List, Macro, Map, Set, SetBlock, Spanned,
    Stmt, Template, Test, Tuple, UnaryOp, UnaryOpKind, Var, WithBlock,
};

/// `left + right`.
pub(crate) const PLUS: &str = "__plus";
/// `left * right`.
pub(crate) const TIMES: &str = "__times";
/// `left ~ right`.
pub(crate) const TILDE: &str = "__tilde";
/// `value[start:stop:step]`.
pub(crate) const SLICE: &str = "__slice";
/// The iterable of a loop.
pub(crate) const EACH: &str = "__each";
/// A literal list, tuple or map.
pub(crate) const MADE: &str = "__made";
/// A value that is put into a namespace.
pub(crate) const PUT: &str = "__put";
/// `*value` among arguments.
pub(crate) const SPREAD: &str = "__spread";
/// An operand of a comparison.
pub(crate) const COMPARED: &str = "__compared";
/// An operand that is searched or tested, if it is a text.
pub(crate) const SCANNED: &str = "__scanned";
/// Takes the number of bytes that the definition of a macro takes; prints nothing.
pub(crate) const DEFINE: &str = "__define";

/// Bytes that a macro's definition takes for each byte of its source: names that it closes over are
/// copied.
const CLOSURE: usize = 16;

/// The statement in our terms.
pub(crate) fn statement<'a>(stmt: &Stmt<'a>) -> Stmt<'a> {
    match stmt {
        Stmt::Template(s) => {
            Stmt::Template(Spanned::new(Template { children: body(&s.children) }, s.span()))
        }
        Stmt::EmitExpr(s) => {
            Stmt::EmitExpr(Spanned::new(EmitExpr { expr: expression(&s.expr) }, s.span()))
        }
        Stmt::EmitRaw(s) => emit(constant(Value::from(s.raw), s.span())),
        Stmt::ForLoop(s) => Stmt::ForLoop(Spanned::new(
            ForLoop {
                target: target(&s.target),
                iter: filter(EACH, expression(&s.iter), Vec::new()),
                filter_expr: s.filter_expr.as_ref().map(expression),
                recursive: s.recursive,
                body: body(&s.body),
                else_body: body(&s.else_body),
            },
            s.span(),
        )),
        Stmt::IfCond(s) => Stmt::IfCond(Spanned::new(
            IfCond {
                expr: expression(&s.expr),
                true_body: body(&s.true_body),
                false_body: body(&s.false_body),
            },
            s.span(),
        )),
        Stmt::WithBlock(s) => Stmt::WithBlock(Spanned::new(
            WithBlock {
                assignments: s
                    .assignments
                    .iter()
                    .map(|(name, value)| (target(name), expression(value)))
                    .collect(),
                body: body(&s.body),
            },
            s.span(),
        )),
        Stmt::Set(s) => {
            let value = expression(&s.expr);
            let attribute = matches!(s.target, Expr::GetAttr(_));
            let expr = if attribute { filter(PUT, value, Vec::new()) } else { value };
            Stmt::Set(Spanned::new(Set { target: target(&s.target), expr }, s.span()))
        }
        Stmt::SetBlock(s) => Stmt::SetBlock(Spanned::new(
            SetBlock {
                target: target(&s.target),
                filter: s.filter.as_ref().map(expression),
                body: body(&s.body),
            },
            s.span(),
        )),
        Stmt::AutoEscape(s) => Stmt::AutoEscape(Spanned::new(
            AutoEscape { enabled: expression(&s.enabled), body: body(&s.body) },
            s.span(),
        )),
        Stmt::FilterBlock(s) => Stmt::FilterBlock(Spanned::new(
            FilterBlock { filter: expression(&s.filter), body: body(&s.body) },
            s.span(),
        )),
        Stmt::Block(s) => Stmt::Block(Spanned::new(
            Block { name: s.name, required: s.required, body: body(&s.body) },
            s.span(),
        )),
        Stmt::Import(s) => Stmt::Import(Spanned::new(
            Import { expr: expression(&s.expr), name: target(&s.name) },
            s.span(),
        )),
        Stmt::FromImport(s) => Stmt::FromImport(Spanned::new(
            FromImport {
                expr: expression(&s.expr),
                names: s
                    .names
                    .iter()
                    .map(|(name, alias)| (target(name), alias.as_ref().map(target)))
                    .collect(),
            },
            s.span(),
        )),
        Stmt::Extends(s) => {
            Stmt::Extends(Spanned::new(Extends { name: expression(&s.name) }, s.span()))
        }
        Stmt::Include(s) => Stmt::Include(Spanned::new(
            Include { name: expression(&s.name), ignore_missing: s.ignore_missing },
            s.span(),
        )),
        Stmt::Macro(s) => Stmt::Macro(definition(s)),
        Stmt::CallBlock(s) => Stmt::CallBlock(Spanned::new(
            CallBlock { call: call(&s.call), macro_decl: definition(&s.macro_decl) },
            s.span(),
        )),
        Stmt::Continue(s) => Stmt::Continue(Spanned::new(Continue, s.span())),
        Stmt::Break(s) => Stmt::Break(Spanned::new(Break, s.span())),
        Stmt::Do(s) => Stmt::Do(Spanned::new(Do { call: call(&s.call) }, s.span())),
    }
}

/// Statements, with what definitions among them take before each.
fn body<'a>(statements: &[Stmt<'a>]) -> Vec<Stmt<'a>> {
    let mut out = Vec::with_capacity(statements.len());
    for stmt in statements {
        let defined = match stmt {
            Stmt::Macro(s) => Some(s.span()),
            Stmt::CallBlock(s) => Some(s.span()),
            _ => None,
        };
        if let Some(span) = defined {
            let source = span.end_offset.saturating_sub(span.start_offset) as usize;
            let bytes = source.saturating_mul(CLOSURE);
            out.push(emit(filter(DEFINE, constant(Value::from(bytes), span), Vec::new())));
        }
        out.push(statement(stmt));
    }
    out
}

fn emit(expr: Expr<'_>) -> Stmt<'_> {
    let span = expr.span();
    Stmt::EmitExpr(Spanned::new(EmitExpr { expr }, span))
}

fn definition<'a>(s: &Spanned<Macro<'a>>) -> Spanned<Macro<'a>> {
    Spanned::new(
        Macro {
            name: s.name,
            args: s.args.iter().map(target).collect(),
            defaults: s.defaults.iter().map(expression).collect(),
            body: body(&s.body),
        },
        s.span(),
    )
}

/// The target of an assignment: names, lists of them, or an attribute. It stays as it is.
fn target<'a>(expr: &Expr<'a>) -> Expr<'a> {
    match expr {
        Expr::List(e) => {
            Expr::List(Spanned::new(List { items: e.items.iter().map(target).collect() }, e.span()))
        }
        Expr::GetAttr(e) => Expr::GetAttr(Spanned::new(
            GetAttr { expr: expression(&e.expr), name: e.name },
            e.span(),
        )),
        other => expression(other),
    }
}

fn constant<'a>(value: Value, span: Span) -> Expr<'a> {
    Expr::Const(Spanned::new(Const { value }, span))
}

fn filter<'a>(name: &'a str, expr: Expr<'a>, args: Vec<CallArg<'a>>) -> Expr<'a> {
    let span = expr.span();
    Expr::Filter(Spanned::new(Filter { name, expr: Some(expr), args }, span))
}

fn call<'a>(s: &Spanned<Call<'a>>) -> Spanned<Call<'a>> {
    Spanned::new(Call { expr: expression(&s.expr), args: arguments(&s.args) }, s.span())
}

fn arguments<'a>(args: &[CallArg<'a>]) -> Vec<CallArg<'a>> {
    args.iter()
        .map(|arg| match arg {
            CallArg::Pos(e) => CallArg::Pos(expression(e)),
            CallArg::Kwarg(name, e) => CallArg::Kwarg(name, expression(e)),
            CallArg::PosSplat(e) => CallArg::PosSplat(filter(SPREAD, expression(e), Vec::new())),
            CallArg::KwargSplat(e) => {
                CallArg::KwargSplat(filter(SPREAD, expression(e), Vec::new()))
            }
        })
        .collect()
}

fn expressions<'a>(items: &[Expr<'a>]) -> Vec<Expr<'a>> {
    items.iter().map(expression).collect()
}

fn expression<'a>(expr: &Expr<'a>) -> Expr<'a> {
    let span = expr.span();
    match expr {
        Expr::Var(e) => Expr::Var(Spanned::new(Var { id: e.id }, span)),
        Expr::Const(e) => constant(e.value.clone(), span),
        Expr::Slice(e) => {
            let bound = |bound: &Option<Expr<'a>>| {
                let none = || constant(Value::from(()), span);
                CallArg::Pos(bound.as_ref().map_or_else(none, expression))
            };
            let bounds = vec![bound(&e.start), bound(&e.stop), bound(&e.step)];
            filter(SLICE, expression(&e.expr), bounds)
        }
        Expr::UnaryOp(e) => {
            // `UnaryOpKind` cannot be copied.
            let not = matches!(e.op, UnaryOpKind::Not);
            let op = if not { UnaryOpKind::Not } else { UnaryOpKind::Neg };
            Expr::UnaryOp(Spanned::new(UnaryOp { op, expr: expression(&e.expr) }, span))
        }
        Expr::BinOp(e) => {
            use BinOpKind::{Add, Concat, Eq, Gt, Gte, In, Lt, Lte, Mul, Ne};
            let (left, right) = (expression(&e.left), expression(&e.right));
            let (left, right) = match e.op {
                Add => return filter(PLUS, left, vec![CallArg::Pos(right)]),
                Mul => return filter(TIMES, left, vec![CallArg::Pos(right)]),
                Concat => return filter(TILDE, left, vec![CallArg::Pos(right)]),
                Eq | Ne | Lt | Lte | Gt | Gte | In => (compared(left), compared(right)),
                _ => (left, right),
            };
            Expr::BinOp(Spanned::new(BinOp { op: e.op, left, right }, span))
        }
        Expr::Compare(e) => Expr::Compare(Spanned::new(
            Compare {
                expr: compared(expression(&e.expr)),
                ops: e
                    .ops
                    .iter()
                    .map(|op| CompareOp { op: op.op, expr: compared(expression(&op.expr)) })
                    .collect(),
            },
            span,
        )),
        Expr::IfExpr(e) => Expr::IfExpr(Spanned::new(
            IfExpr {
                test_expr: expression(&e.test_expr),
                true_expr: expression(&e.true_expr),
                false_expr: e.false_expr.as_ref().map(expression),
            },
            span,
        )),
        Expr::Filter(e) => Expr::Filter(Spanned::new(
            Filter {
                name: e.name,
                expr: e.expr.as_ref().map(expression),
                args: arguments(&e.args),
            },
            span,
        )),
        Expr::Test(e) => {
            let value = expression(&e.expr);
            let expr = if e.args.is_empty() { scanned(value) } else { compared(value) };
            let args = arguments(&e.args).into_iter().map(|arg| match arg {
                CallArg::Pos(e) => CallArg::Pos(compared(e)),
                other => other,
            });
            Expr::Test(Spanned::new(Test { name: e.name, expr, args: args.collect() }, span))
        }
        Expr::GetAttr(e) => {
            Expr::GetAttr(Spanned::new(GetAttr { expr: expression(&e.expr), name: e.name }, span))
        }
        Expr::GetItem(e) => Expr::GetItem(Spanned::new(
            GetItem {
                // A text has no item of a name.
                expr: match e.subscript_expr.as_const().filter(|key| key.as_str().is_some()) {
                    Some(_) => expression(&e.expr),
                    None => scanned(expression(&e.expr)),
                },
                subscript_expr: expression(&e.subscript_expr),
            },
            span,
        )),
        Expr::Call(e) => Expr::Call(call(e)),
        Expr::List(e) => {
            made(Expr::List(Spanned::new(List { items: expressions(&e.items) }, span)))
        }
        Expr::Tuple(e) => {
            made(Expr::Tuple(Spanned::new(Tuple { items: expressions(&e.items) }, span)))
        }
        Expr::Map(e) => {
            let (keys, values) = (expressions(&e.keys), expressions(&e.values));
            made(Expr::Map(Spanned::new(Map { keys, values }, span)))
        }
    }
}

fn compared(expr: Expr<'_>) -> Expr<'_> {
    if matches!(expr, Expr::Const(_)) { expr } else { filter(COMPARED, expr, Vec::new()) }
}

fn scanned(expr: Expr<'_>) -> Expr<'_> {
    if matches!(expr, Expr::Const(_)) { expr } else { filter(SCANNED, expr, Vec::new()) }
}

/// A literal; one of constants alone is made once, when the template is compiled.
fn made(literal: Expr<'_>) -> Expr<'_> {
    if literal.as_const().is_some() { literal } else { filter(MADE, literal, Vec::new()) }
}
