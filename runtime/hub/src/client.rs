//! HTTP client of the hub.

use crate::cache::Cache;
use crate::error::{Error, Result};
use crate::listing::{Entry, Listing};
use crate::reference::{Reference, is_inner_path};
use samite_core::environment::{Clock, Environment};
use serde::Deserialize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use ureq::http::{HeaderMap, Response, StatusCode, header};
use ureq::{Agent, Body};

/// Maximum size in bytes of a response that is not a file.
const MAX_ANSWER_LEN: u64 = 32 << 20;
/// Maximum number of pages in a file list.
const MAX_PAGES: usize = 50;
/// Maximum number of redirects of a request.
const MAX_REDIRECTS: u32 = 8;

/// Options for the connection to a hub.
#[derive(Clone, Debug)]
pub struct HubOptions {
    /// Base URL, without a trailing slash.
    pub endpoint: String,
    /// Access token of the user.
    pub token: Option<String>,
    /// Timeout for a silent connection.
    pub patience: Duration,
    /// Maximum number of consecutive attempts without progress.
    pub attempts: u32,
    /// Clock for delays between attempts.
    pub clock: Arc<dyn Clock>,
}

impl Default for HubOptions {
    fn default() -> Self {
        HubOptions {
            endpoint: "https://huggingface.co".to_owned(),
            token: None,
            patience: Duration::from_secs(20),
            attempts: 5,
            clock: Environment::system().clock,
        }
    }
}

impl HubOptions {
    /// Returns the options from the environment variables that other clients use: `HF_ENDPOINT`,
    /// `HF_TOKEN`, `HF_TOKEN_PATH`, `HF_HOME`.
    pub fn from_environment() -> Self {
        let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let token_file = || {
            let home = || Some(Cache::home()?.join("token"));
            let path = variable("HF_TOKEN_PATH").map(PathBuf::from).or_else(home)?;
            std::fs::read_to_string(path).ok()
        };
        let token = variable("HF_TOKEN").or_else(token_file);
        let defaults = HubOptions::default();
        HubOptions {
            endpoint: variable("HF_ENDPOINT").map_or(defaults.endpoint, |endpoint| {
                endpoint.trim_end_matches('/').to_owned()
            }),
            token: token
                .map(|token| token.trim().to_owned())
                .filter(|token| !token.is_empty()),
            ..defaults
        }
    }

    /// Returns these options with a short timeout and without retries, for a response that the
    /// caller can do without.
    #[must_use]
    pub fn with_short_timeout(self) -> Self {
        HubOptions {
            patience: self.patience.min(Duration::from_secs(3)),
            attempts: 0,
            ..self
        }
    }
}

/// A model hub.
///
/// ```no_run
/// use samite_core::CancelToken;
/// use samite_hub::{Cache, Error, Hub, HubOptions};
///
/// let hub = Hub::new(HubOptions::from_environment());
/// let cache = Cache::of_user().ok_or(Error::NoCache)?;
/// let reference = "ggml-org/SmolLM2-135M-GGUF:Q8_0".parse()?;
/// let listing = hub.list(&reference, "main")?;
/// for file in listing.choose(&reference)? {
///     let mut report = |progress| println!("{progress:?}");
///     let path = hub.fetch(&cache, &listing, file, &mut report, &CancelToken::new())?;
///     println!("{}", path.display());
/// }
/// # Ok::<_, Error>(())
/// ```
#[derive(Debug)]
pub struct Hub {
    pub(crate) options: HubOptions,
    agent: Agent,
}

#[derive(Deserialize)]
struct Revision {
    sha: String,
}

/// A failed request, and whether a retry may succeed.
pub(crate) struct Failed {
    pub error: Error,
    pub again: bool,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Failed {
            error,
            again: false,
        }
    }
}

impl Hub {
    /// Creates a hub client without sending a request.
    pub fn new(options: HubOptions) -> Self {
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(MAX_REDIRECTS)
            .timeout_resolve(Some(options.patience))
            .timeout_connect(Some(options.patience))
            .timeout_recv_response(Some(options.patience))
            .timeout_per_read(Some(options.patience))
            .user_agent(concat!("samite/", env!("CARGO_PKG_VERSION")))
            .build();
        Hub {
            options,
            agent: agent.into(),
        }
    }

    /// Lists the model files of a repository.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Refused`], [`Error::Answer`], [`Error::Connection`].
    pub fn list(&self, reference: &Reference, revision: &str) -> Result<Listing> {
        let repository = &reference.repository;
        if !is_inner_path(revision) {
            return Err(Error::NotFound(format!(
                "'{}' is no revision: give a branch, a tag or a commit",
                revision.escape_debug()
            )));
        }
        let models = format!("{}/api/models/{repository}", self.options.endpoint);
        let url = format!("{models}/revision/{}", encoded(revision));
        let (found, _): (Revision, _) = self.json(&url)?;
        let commit = found.sha;
        if commit.len() != 40 || !commit.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(Error::Answer {
                url,
                problem: "the answer names no commit".to_owned(),
            });
        }
        let mut files = Vec::new();
        let mut next = Some(format!("{models}/tree/{commit}?recursive=true"));
        for _ in 0..MAX_PAGES {
            let Some(url) = next else { break };
            let (entries, headers): (Vec<Entry>, _) = self.json(&url)?;
            files.extend(entries.into_iter().filter_map(Entry::into_file));
            next = next_page(&headers).filter(|url| is_within(&self.options.endpoint, url));
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(Listing {
            repository: repository.clone(),
            revision: revision.to_owned(),
            commit,
            files,
        })
    }

    /// Returns the URL of a file.
    pub(crate) fn address(&self, listing: &Listing, path: &str) -> String {
        let Listing {
            repository, commit, ..
        } = listing;
        let endpoint = &self.options.endpoint;
        format!("{endpoint}/{repository}/resolve/{commit}/{}", encoded(path))
    }

    fn json<T: serde::de::DeserializeOwned>(&self, url: &str) -> Result<(T, HeaderMap)> {
        let ask = || -> Result<_, Failed> {
            let response = self.get(url, None)?;
            let (parts, body) = response.into_parts();
            let text = body.into_with_config().limit(MAX_ANSWER_LEN).read_to_vec();
            let text = text.map_err(|error| self.failed(url, error))?;
            let value = serde_json::from_slice(&text).map_err(|error| Error::Answer {
                url: url.to_owned(),
                problem: format!("the answer is not what a hub of models says: {error}"),
            })?;
            Ok((value, parts.headers))
        };
        let mut attempt = 0;
        loop {
            match ask() {
                Ok(answer) => return Ok(answer),
                Err(failed) if failed.again && attempt < self.options.attempts => {
                    self.wait(&failed.error, attempt);
                    attempt += 1;
                }
                Err(failed) => return Err(failed.error),
            }
        }
    }

    /// Waits before the next attempt, longer each time.
    pub(crate) fn wait(&self, error: &Error, attempt: u32) {
        tracing::info!(%error, attempt, "trying again");
        let longest = self.options.patience / 2;
        let time = Duration::from_millis(250).saturating_mul(1 << attempt.min(10));
        self.options.clock.sleep(time.min(longest));
    }

    /// Requests `url`, starting at byte `first`.
    pub(crate) fn get(&self, url: &str, first: Option<u64>) -> Result<Response<Body>, Failed> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.options.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        if let Some(first) = first {
            request = request.header(header::RANGE, format!("bytes={first}-"));
        }
        let response = request.call().map_err(|error| self.failed(url, error))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let url = url.to_owned();
        let again = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
        let error = match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Error::Refused {
                url,
                status: status.as_u16(),
            },
            StatusCode::NOT_FOUND => Error::NotFound(format!(
                "{url}: there is nothing of that name: check owner, name, revision and file"
            )),
            _ if again => Error::Connection {
                url,
                problem: format!("the server answers {status}"),
            },
            _ => Error::Answer {
                url,
                problem: format!("the server answers {status}"),
            },
        };
        Err(Failed { error, again })
    }

    pub(crate) fn failed(&self, url: &str, error: ureq::Error) -> Failed {
        let url = url.to_owned();
        let wrong = |problem: String| Error::Answer {
            url: url.clone(),
            problem,
        };
        match error {
            ureq::Error::TooManyRedirects | ureq::Error::RedirectFailed => {
                wrong(format!("it redirects without an end ({error})")).into()
            }
            ureq::Error::BodyExceedsLimit(limit) => {
                wrong(format!("the answer has more than {limit} bytes")).into()
            }
            ureq::Error::BadUri(_) | ureq::Error::InvalidProxyUrl | ureq::Error::Http(_) => {
                wrong(error.to_string()).into()
            }
            error => Failed {
                error: Error::Connection {
                    url: url.clone(),
                    problem: match error {
                        ureq::Error::Timeout(_) => {
                            format!("no answer for {} s", self.options.patience.as_secs_f32())
                        }
                        error => error.to_string(),
                    },
                },
                again: true,
            },
        }
    }
}

/// Percent-encodes `path` for a URL.
fn encoded(path: &str) -> String {
    let mut encoded = String::with_capacity(path.len());
    for byte in path.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b'/' => {
                encoded.push(char::from(byte));
            }
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

/// Returns true if a URL is one of the hub's own, which gets the token. `https://hub.co.evil.com`
/// and `https://hub.co@evil.com` also begin with `https://hub.co`.
fn is_within(endpoint: &str, url: &str) -> bool {
    let rest = url.strip_prefix(endpoint.trim_end_matches('/'));
    rest.is_some_and(|rest| rest.starts_with('/'))
}

/// Returns the URL of a list's next page, from the header `Link` (RFC 8288).
fn next_page(headers: &HeaderMap) -> Option<String> {
    let links = headers.get(header::LINK)?.to_str().ok()?;
    let next = links
        .split(',')
        .find(|link| link.contains("rel=\"next\""))?;
    let (_, rest) = next.split_once('<')?;
    Some(rest.split_once('>')?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_hosts_are_not_the_hub() {
        for endpoint in ["https://hub.co", "https://hub.co/"] {
            assert!(is_within(endpoint, "https://hub.co/api/models?cursor=2"));
            for other in [
                "https://hub.co.evil.com/api",
                "https://hub.co@evil.com/api",
                "https://hub.co:80/api",
                "http://hub.co/api",
                "https://evil.com/https://hub.co/",
                "https://hub.co",
            ] {
                assert!(!is_within(endpoint, other), "{other}");
            }
        }
    }
}
