//! The web page, as files that are part of the program.

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};

macro_rules! files {
    ($($path:literal $file:literal $kind:literal)*) => {
        /// Path, type and content of each file.
        const FILES: &[(&str, &str,
            &str)] = &[$(($path, $kind, include_str!(concat!("../page/", $file)))),*];
    };
}

files! {
    "/" "index.html" "text/html; charset=utf-8"
    "/index.html" "index.html" "text/html; charset=utf-8"
    "/app.js" "app.js" "text/javascript; charset=utf-8"
    "/client.js" "client.js" "text/javascript; charset=utf-8"
    "/dom.js" "dom.js" "text/javascript; charset=utf-8"
    "/images.js" "images.js" "text/javascript; charset=utf-8"
    "/machine.js" "machine.js" "text/javascript; charset=utf-8"
    "/markdown.js" "markdown.js" "text/javascript; charset=utf-8"
    "/store.js" "store.js" "text/javascript; charset=utf-8"
    "/style.css" "style.css" "text/css; charset=utf-8"
    "/vendor/markdown-it-15.0.3.min.js" "vendor/markdown-it-15.0.3.min.js" "text/javascript; \
        charset=utf-8"
    "/vendor/temml-0.13.5.min.js" "vendor/temml-0.13.5.min.js" "text/javascript; charset=utf-8"
    "/vendor/highlight-11.12.0.min.js" "vendor/highlight-11.12.0.min.js" "text/javascript; \
        charset=utf-8"
    "/vendor/licences.txt" "vendor/licences.txt" "text/plain; charset=utf-8"
    "/icon.svg" "icon.svg" "image/svg+xml"
    "/manifest.webmanifest" "manifest.webmanifest" "application/manifest+json"
}

/// Content security policy: only content from this server may run or be shown.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    img-src 'self' blob:; connect-src 'self'; manifest-src 'self'; base-uri 'none'; \
    form-action 'none'; frame-ancestors 'none'";

/// Returns whether `path` is the path of a file.
pub fn is_file(path: &str) -> bool {
    FILES.iter().any(|(known, ..)| *known == path)
}

/// Returns the file at `path`.
pub fn file(path: &str) -> Option<Response> {
    let (_, kind, text) = FILES.iter().find(|(known, ..)| *known == path)?;
    let mut response = Body::from(*text).into_response();
    // File names of libraries include the version, so they never change.
    let kept = if path.ends_with(".min.js") {
        "max-age=31536000, immutable"
    } else {
        "no-cache"
    };
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, *kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, kept),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    Some(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_page_is_served() {
        for folder in ["", "/vendor"] {
            let files = concat!(env!("CARGO_MANIFEST_DIR"), "/page").to_owned() + folder;
            for entry in std::fs::read_dir(files).unwrap().map(Result::unwrap) {
                let name = entry.file_name().into_string().unwrap();
                let is_folder = entry.file_type().unwrap().is_dir();
                assert!(is_folder || is_file(&format!("{folder}/{name}")), "{name}");
            }
        }
        let bytes: usize = FILES.iter().map(|(.., text)| text.len()).sum();
        assert!(bytes < 500_000, "{bytes}");
        assert!(file("/../Cargo.toml").is_none() && file("/").is_some());
    }
}
