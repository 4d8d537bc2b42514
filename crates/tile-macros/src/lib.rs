//! `#[kernel]`: turns a Rust function into one that builds a kernel when called.
//!
//! ```text
//! #[kernel]
//! pub fn scale<T: Float>(x: In<T>, y: Out<T>, by: Const<f32>, width: u32) { .. }
//! ```
//! becomes `pub fn scale<T: Float>(width: u32) -> Kernel`. Parameters of the types `In`, `Out`, `InOut`, `Const` and `Arg`
//! are the kernel's; all others stay the function's, known while it builds. The kernel is named after the function
//! and its type parameters (`scale_f16`); `rename` in the body changes that.
//!
//! In the body these forms are rewritten, on spans of the user's source, so that both the device's values and plain
//! Rust values work in them: `for`, `if`/`else` as statements, comparisons, `x[i]`, `x[i] = v`, `x[i] += v`, `v = e` and
//! reads of `x[i]`. Everything else is plain Rust.

mod body;

use proc_macro::TokenStream;
use quote::{format_ident, quote};
use syn::spanned::Spanned;
use syn::{Error, FnArg, GenericParam, ItemFn, Pat, PathArguments, Result, ReturnType, Type};

/// See the crate's documentation.
#[proc_macro_attribute]
pub fn kernel(arguments: TokenStream, item: TokenStream) -> TokenStream {
    let item = syn::parse_macro_input!(item as ItemFn);
    if !arguments.is_empty() {
        let error = Error::new(item.sig.ident.span(), "#[kernel] takes no arguments");
        return error.to_compile_error().into();
    }
    expand(item).unwrap_or_else(|error| error.to_compile_error()).into()
}

fn expand(mut item: ItemFn) -> Result<proc_macro2::TokenStream> {
    let signature = &item.sig;
    if !matches!(signature.output, ReturnType::Default) {
        return Err(Error::new(
            signature.output.span(),
            "a kernel returns nothing: it writes buffers",
        ));
    }
    if let Some(word) = &signature.asyncness {
        return Err(Error::new(word.span(), "a kernel cannot be async"));
    }
    let mut declared = Vec::new();
    let mut kept = Vec::new();
    for argument in &signature.inputs {
        let FnArg::Typed(typed) = argument else {
            return Err(Error::new(argument.span(), "a kernel is a free function"));
        };
        if !is_device(&typed.ty) {
            kept.push(argument.clone());
            continue;
        }
        let Pat::Ident(name) = &*typed.pat else {
            return Err(Error::new(typed.pat.span(), "a kernel's parameter is a plain name"));
        };
        let (name, ty) = (&name.ident, &typed.ty);
        let text = name.to_string();
        declared.push(quote! {
            #[allow(unused_variables)]
            let #name = <#ty>::declare(#text);
        });
    }
    let (vis, attrs, name, generics) =
        (&item.vis, &item.attrs, &signature.ident, &signature.generics);
    let stem = name.to_string();
    let mut label = quote! { let mut name = ::std::string::String::from(#stem); };
    for parameter in &generics.params {
        if let GenericParam::Type(ty) = parameter {
            let ty = &ty.ident;
            label.extend(quote! {
                name.push('_');
                name.push_str(::tile::dsl::name_of::<#ty>());
            });
        }
    }
    let clause = &generics.where_clause;
    let build = format_ident!("build");
    body::rewrite(&mut item.block)?;
    let statements = &item.block.stmts;
    Ok(quote! {
        #(#attrs)*
        #vis fn #name #generics (#(#kept),*) -> ::tile::Kernel #clause {
            #label
            ::tile::dsl::#build(&name, || {
                #(#declared)*
                #(#statements)*
            })
        }
    })
}

/// Whether a parameter is bound at launch.
fn is_device(ty: &Type) -> bool {
    let Type::Path(path) = ty else { return false };
    path.path.segments.last().is_some_and(|last| {
        matches!(last.ident.to_string().as_str(), "In" | "Out" | "InOut" | "Const" | "Arg")
            && matches!(last.arguments, PathArguments::AngleBracketed(_))
    })
}
