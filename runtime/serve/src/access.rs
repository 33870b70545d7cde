//! Access control: API keys, which identify owners, and cross-origin requests.

use crate::options::ServeOptions;
use axum::http::{HeaderMap, HeaderValue, header};
use std::net::IpAddr;

/// The caller of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Number derived from the key. Data of one owner is hidden from all others. 0 if there is at
    /// most one key.
    pub owner: u64,
    /// True if the caller may load and unload models, change shared settings, and see requests of
    /// other keys.
    pub is_admin: bool,
}

/// Returns the caller whose key is in the headers. Without any keys, all requests have one caller.
/// The comparison takes the same time however much of a key is right.
pub fn caller(options: &ServeOptions, headers: &HeaderMap) -> Option<Caller> {
    let keys = || options.api_keys.iter().chain(&options.admin_keys);
    let count = keys().count();
    let everybody = Caller {
        owner: 0,
        is_admin: true,
    };
    if count == 0 {
        return Some(everybody);
    }
    let text = |name: header::HeaderName| headers.get(name)?.to_str().ok();
    // Scheme names are case-insensitive (RFC 9110, 11.1).
    let bearer = text(header::AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(key)
    });
    let given = bearer.or_else(|| text(header::HeaderName::from_static("x-api-key")));
    let given = blake3::hash(given?.trim().as_bytes());
    // Compare with every key, by hash, in constant time.
    let is_one = |keys: &[String]| {
        keys.iter().fold(false, |found, key| {
            found | (blake3::hash(key.as_bytes()) == given)
        })
    };
    let (is_admin, is_user) = (is_one(&options.admin_keys), is_one(&options.api_keys));
    if !is_admin && !is_user {
        return None;
    }
    if count == 1 {
        return Some(everybody);
    }
    // The number is stable over restarts, so saved data is found again, and does not reveal the
    // key.
    let owner = blake3::derive_key("samite owner of requests", given.as_bytes());
    let owner = owner
        .first_chunk()
        .map_or(1, |bytes| u64::from_le_bytes(*bytes));
    Some(Caller {
        owner: owner.max(1),
        is_admin,
    })
}

/// Returns true if requests need a key.
fn has_keys(options: &ServeOptions) -> bool {
    !options.api_keys.is_empty() || !options.admin_keys.is_empty()
}

/// Returns whether the host of a request is a name of this server. Without keys, a foreign page
/// could point its own name at this server and read responses as if they were its own (DNS
/// rebinding). This is impossible with numeric addresses and with names that no public zone
/// contains.
pub fn is_own_host(options: &ServeOptions, headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(header::HOST) else {
        return true;
    };
    if has_keys(options) {
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
        || is_private_name(name)
        || name.parse::<IpAddr>().is_ok()
        || options.hosts.iter().any(is_given)
        || options.allowed_hosts.iter().any(is_given)
}

/// Returns whether a name cannot be in the public domain name system: it has no dot, or is in a
/// zone that is reserved for private use (RFC 6761, 6762, 8375; ICANN's `internal`) or that home
/// routers use.
fn is_private_name(name: &str) -> bool {
    const ZONES: [&str; 6] = ["localhost", "local", "internal", "home.arpa", "lan", "test"];
    let lower = name.to_ascii_lowercase();
    let is_in = |zone: &str| {
        let rest = lower.strip_suffix(zone);
        rest.is_some_and(|rest| rest.ends_with('.'))
    };
    !lower.contains('.') || ZONES.iter().any(|zone| is_in(zone))
}

/// Returns whether a name or address in a URL refers to this machine.
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

/// Returns whether the request comes from a page of an origin that is not allowed. Browsers send
/// the origin with a request. Programs that display pages of their own use other schemes, which no
/// web page can have.
pub fn is_foreign(options: &ServeOptions, headers: &HeaderMap) -> bool {
    let Some(origin) = headers.get(header::ORIGIN) else {
        return false;
    };
    if has_keys(options) {
        return false;
    }
    let Ok(origin) = origin.to_str() else {
        return true;
    };
    let Some((scheme, name)) = origin.split_once("://") else {
        // "null" is the origin of sandboxed and local pages, which may belong to anyone.
        return !is_allowed(options, origin);
    };
    let is_web = scheme.eq_ignore_ascii_case("http") || scheme.eq_ignore_ascii_case("https");
    let host = headers
        .get(header::HOST)
        .and_then(|host| host.to_str().ok());
    let is_own = host.is_some_and(|host| host.eq_ignore_ascii_case(name));
    is_web && !is_own && !is_allowed(options, origin)
}

/// Returns whether pages of this origin may read responses. If a key is required and no list
/// restricts origins, all may: a page without the key can read nothing.
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
    if list.is_empty() {
        has_keys(options) || is_local()
    } else {
        list.iter().any(|allowed| match allowed.as_str() {
            "*" => true,
            "localhost" => is_local(),
            other => other == origin,
        })
    }
}

/// Adds the CORS headers.
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
