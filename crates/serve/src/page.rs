//! The web page: files inside the program, served with a policy that lets the page ask this server
//! alone.

use std::sync::Arc;

use axum::Router;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};

use crate::router::App;

/// Path, type and text of each file.
const FILES: [(&str, &str, &str); 7] = [
    ("/", "text/html; charset=utf-8", include_str!("page/index.html")),
    ("/page/style.css", "text/css; charset=utf-8", include_str!("page/style.css")),
    ("/page/markdown.js", "text/javascript; charset=utf-8", include_str!("page/markdown.js")),
    ("/page/make.js", "text/javascript; charset=utf-8", include_str!("page/make.js")),
    ("/page/models.js", "text/javascript; charset=utf-8", include_str!("page/models.js")),
    ("/page/tokens.js", "text/javascript; charset=utf-8", include_str!("page/tokens.js")),
    ("/page/app.js", "text/javascript; charset=utf-8", include_str!("page/app.js")),
];

/// Scripts, styles and requests are this server's own; a model's text can bring in nothing.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page's paths.
pub(crate) fn router() -> Router<Arc<App>> {
    FILES.into_iter().fold(Router::new(), |router, (path, kind, text)| {
        router.route(path, get(move || async move { file(kind, text) }))
    })
}

fn file(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (CONTENT_TYPE, kind),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        // A newer program brings a newer page.
        (CACHE_CONTROL, "no-cache"),
    ];
    (headers, text).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_loads_nothing_from_elsewhere_and_makes_no_markup_of_text() {
        for (path, _, text) in FILES {
            for forbidden in
                ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("]
            {
                assert!(!text.contains(forbidden), "{path}: {forbidden}");
            }
            for (at, _) in text.match_indices("http") {
                let rest: String = text[at..].chars().take(30).collect();
                let own = rest.starts_with("http://www.w3.org/") || !rest.contains("://");
                assert!(own || rest.starts_with("https?:"), "{path}: {rest}");
            }
            assert!(!text.contains("src=\"//"), "{path}");
        }
    }
}
