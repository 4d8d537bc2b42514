//! `#[kernel]`: turns a Rust function into one that says how to record a kernel.
//!
//! ```text
//! #[kernel]
//! pub fn scale(x: In<{ scalar }>, y: Out<{ scalar }>, by: Const<f32>, scalar: Scalar) { .. }
//! ```
//! becomes `pub fn scale(scalar: Scalar) -> Recipe<'static>`. Parameters of the types `In`, `Out`,
//! `InOut`, `Const` and `Arg` are the kernel's; all others stay the function's, known while it
//! records. A buffer's element type stands between braces, an expression of the function's
//! parameters, or is a type of the language: `In<u32>`. The kernel is named after the function and
//! the values of its parameters, all of which its recipe's key holds.
//!
//! In the body these forms are rewritten, on spans of the user's source, so that both the device's
//! values and plain Rust values work in them: `for`, `if`/`else` as statements, comparisons, `&&`,
//! `||`, `x[i]`, `x[i] = v`, `x[i] += v`, `v = e` and reads of `x[i]`. Everything else is plain
//! Rust. `#[device]` rewrites the body of a helper alike.

mod body;

use proc_macro::TokenStream;
use quote::quote;
use syn::spanned::Spanned;
use syn::{
    Error, Expr, FnArg, GenericArgument, Ident, ItemFn, Pat, PathArguments, Result, ReturnType,
    Stmt, Type,
};

/// See the crate's documentation.
#[proc_macro_attribute]
pub fn kernel(arguments: TokenStream, item: TokenStream) -> TokenStream {
    attribute("kernel", arguments, item, expand)
}

/// A function that kernels call, written as they are: see the crate's documentation.
#[proc_macro_attribute]
pub fn device(arguments: TokenStream, item: TokenStream) -> TokenStream {
    attribute("device", arguments, item, |mut item| {
        body::rewrite(&mut item.block, &item.sig.output)?;
        Ok(quote!(#[track_caller] #item))
    })
}

fn attribute(
    name: &str,
    arguments: TokenStream,
    item: TokenStream,
    expand: impl FnOnce(ItemFn) -> Result<proc_macro2::TokenStream>,
) -> TokenStream {
    let item = syn::parse_macro_input!(item as ItemFn);
    if !arguments.is_empty() {
        let error = Error::new(item.sig.ident.span(), format!("#[{name}] takes no arguments"));
        return error.to_compile_error().into();
    }
    expand(item).unwrap_or_else(|error| error.to_compile_error()).into()
}

/// A kernel's signature.
#[derive(Default)]
struct Signature {
    /// Statements that declare the kernel's parameters.
    declared: Vec<proc_macro2::TokenStream>,
    /// The function's parameters, and their names.
    kept: Vec<FnArg>,
    names: Vec<Ident>,
    /// Whether one of those is borrowed.
    borrows: bool,
}

impl Signature {
    fn read(signature: &syn::Signature) -> Result<Signature> {
        let refuse = |at: &dyn Spanned, why: &str| Err(Error::new(at.span(), why));
        if !matches!(signature.output, ReturnType::Default) {
            return refuse(&signature.output, "a kernel returns nothing: it writes buffers");
        }
        if let Some(word) = &signature.asyncness {
            return refuse(word, "a kernel cannot be async");
        }
        if !signature.generics.params.is_empty() {
            let why = "a kernel has no generics: types and schedules are values that it takes";
            return refuse(&signature.generics, why);
        }
        let mut read = Signature::default();
        for argument in &signature.inputs {
            let FnArg::Typed(typed) = argument else {
                return refuse(argument, "a kernel is a free function");
            };
            let Pat::Ident(name) = &*typed.pat else {
                return refuse(&typed.pat, "a kernel's parameter is a plain name");
            };
            read.add(argument, &name.ident, &typed.ty);
        }
        Ok(read)
    }

    fn add(&mut self, argument: &FnArg, name: &Ident, ty: &Type) {
        let text = name.to_string();
        let value = match device_type(ty) {
            None => {
                self.kept.push(argument.clone());
                self.names.push(name.clone());
                self.borrows |= matches!(ty, Type::Reference(_));
                return;
            }
            Some(Stored::As(buffer, scalar)) => {
                quote!(<::tile::dsl::#buffer>::stored(#text, #scalar))
            }
            Some(Stored::Typed) => quote!(<#ty>::declare(#text)),
        };
        self.declared.push(quote! {
            #[allow(unused_variables)]
            let #name = #value;
        });
    }
}

fn expand(mut item: ItemFn) -> Result<proc_macro2::TokenStream> {
    let Signature { declared, kept, names, borrows } = Signature::read(&item.sig)?;
    body::rewrite(&mut item.block, &ReturnType::Default)?;
    let (vis, attrs, name) = (&item.vis, &item.attrs, &item.sig.ident);
    let (stem, words) = (name.to_string(), names.iter().map(Ident::to_string));
    let life = if borrows { quote!('_) } else { quote!('static) };
    let statements = &item.block.stmts;
    Ok(quote! {
        #(#attrs)*
        #vis fn #name(#(#kept),*) -> ::tile::dsl::Recipe<#life> {
            let parameters = ::tile::dsl::Recipe::parameters(&[#((#words, &#names)),*]);
            ::tile::dsl::Recipe::new(::std::module_path!(), #stem, parameters, ::std::boxed::Box::new(move || {
                #(#declared)*
                #(#statements)*
            }))
        }
    })
}

/// The content of a parameter that is bound at launch.
enum Stored {
    /// A type of the language.
    Typed,
    /// Numbers that this kind of buffer stores as an expression says.
    As(Ident, Expr),
}

/// The expression of `{ expression }`.
fn unbraced(expr: &Expr) -> &Expr {
    match expr {
        Expr::Block(block) => match &block.block.stmts[..] {
            [Stmt::Expr(inner, None)] => inner,
            _ => expr,
        },
        _ => expr,
    }
}

/// Whether a parameter is bound at launch, and what it holds.
fn device_type(ty: &Type) -> Option<Stored> {
    let Type::Path(path) = ty else { return None };
    let last = path.path.segments.last()?;
    let PathArguments::AngleBracketed(arguments) = &last.arguments else { return None };
    match last.ident.to_string().as_str() {
        "In" | "Out" | "InOut" => Some(match arguments.args.first() {
            Some(GenericArgument::Const(scalar)) => {
                Stored::As(last.ident.clone(), unbraced(scalar).clone())
            }
            _ => Stored::Typed,
        }),
        "Const" | "Arg" => Some(Stored::Typed),
        _ => None,
    }
}
