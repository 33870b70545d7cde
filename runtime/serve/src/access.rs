//! Who may ask: keys, and pages of other origins.

use crate::options::ServeOptions;
use axum::http::{HeaderMap, HeaderValue, header};
use std::net::IpAddr;

/// Whether the headers have one of the keys. The time it takes does not depend on how much of a key is right.
pub fn has_key(options: &ServeOptions, headers: &HeaderMap) -> bool {
    if options.api_keys.is_empty() {
        return true;
    }
    let text = |name: header::HeaderName| headers.get(name)?.to_str().ok();
    // The name of a scheme is the same in capitals (RFC 9110, 11.1).
    let bearer = text(header::AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(key)
    });
    let given = bearer.or_else(|| text(header::HeaderName::from_static("x-api-key")));
    let Some(given) = given else {
        return false;
    };
    let given = blake3::hash(given.trim().as_bytes());
    let known = options.api_keys.iter();
    // All are compared, and hashes in constant time.
    known.fold(false, |found, key| {
        found | (blake3::hash(key.as_bytes()) == given)
    })
}

/// Whether the request is for a name of this server. Without keys, a page elsewhere could have its own name lead here, and read answers as if they were its
/// own (DNS rebinding). Numeric addresses cannot be made to do so. A server that other machines also
/// reach may have any name.
pub fn is_own_host(options: &ServeOptions, is_local: bool, headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(header::HOST) else {
        return true;
    };
    if !options.api_keys.is_empty() || !is_local {
        return true;
    }
    let Ok(host) = host.to_str() else {
        return false;
    };
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    let name = match host.rsplit_once(':') {
        Some((name, port)) if is_port(port) => name,
        _ => host,
    };
    let name = unbracketed(name);
    let is_given = |host: &String| unbracketed(host.trim()).eq_ignore_ascii_case(name);
    name.is_empty()
        || is_local_name(name)
        || name.parse::<IpAddr>().is_ok()
        || options.hosts.iter().any(is_given)
}

/// Returns true if a name or address in a URL leads to this machine.
fn is_local_name(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    let address = unbracketed(name).parse::<IpAddr>();
    lower == "localhost"
        || lower.ends_with(".localhost")
        || address.is_ok_and(|address| address.to_canonical().is_loopback())
}

fn unbracketed(name: &str) -> &str {
    name.trim_start_matches('[').trim_end_matches(']')
}

/// Whether a page elsewhere asks that nobody allowed. Browsers say where a page is from when it sends something. Programs that show pages of their own have
/// other schemes, which no page elsewhere can have.
pub fn is_foreign(options: &ServeOptions, headers: &HeaderMap) -> bool {
    let Some(origin) = headers.get(header::ORIGIN) else {
        return false;
    };
    if !options.api_keys.is_empty() {
        return false;
    }
    let Ok(origin) = origin.to_str() else {
        return true;
    };
    let Some((scheme, name)) = origin.split_once("://") else {
        // "null" is the origin of pages that may be anybody's.
        return !is_allowed(options, origin);
    };
    let is_web = scheme.eq_ignore_ascii_case("http") || scheme.eq_ignore_ascii_case("https");
    let host = headers
        .get(header::HOST)
        .and_then(|host| host.to_str().ok());
    let is_own = host.is_some_and(|host| host.eq_ignore_ascii_case(name));
    is_web && !is_own && !is_allowed(options, origin)
}

/// Whether pages of this origin may read answers. Where a key is needed, and no list says otherwise, all may: a page that does not know the key reads nothing.
fn is_allowed(options: &ServeOptions, origin: &str) -> bool {
    let list = &options.cors_origins;
    let is_local = || {
        let rest = origin.split_once("://").map_or("", |(_, rest)| rest);
        let host = match rest.rsplit_once(':') {
            Some((host, port)) if port.chars().all(|c| c.is_ascii_digit()) => host,
            _ => rest,
        };
        is_local_name(host)
    };
    match list.is_empty() {
        true => !options.api_keys.is_empty() || is_local(),
        false => list.iter().any(|allowed| match allowed.as_str() {
            "*" => true,
            "localhost" => is_local(),
            other => other == origin,
        }),
    }
}

/// Adds what browsers want to know about other origins.
pub fn add_cors(
    options: &ServeOptions,
    asked: &HeaderMap,
    answer: &mut HeaderMap,
    is_preflight: bool,
) {
    let Some(origin) = asked.get(header::ORIGIN) else {
        return;
    };
    answer.insert(header::VARY, HeaderValue::from_static("Origin"));
    if !origin
        .to_str()
        .is_ok_and(|origin| is_allowed(options, origin))
    {
        return;
    }
    answer.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
    let add = [
        (header::ACCESS_CONTROL_ALLOW_CREDENTIALS, "true"),
        (
            header::ACCESS_CONTROL_ALLOW_METHODS,
            "GET, POST, DELETE, OPTIONS",
        ),
        (header::ACCESS_CONTROL_ALLOW_HEADERS, "*"),
    ];
    let count = if is_preflight { add.len() } else { 1 };
    for (name, value) in add.into_iter().take(count) {
        answer.insert(name, HeaderValue::from_static(value));
    }
}
