//! Files of the web that clients of a server name, such as images.

use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};
use ureq::{Agent, config::Config};

/// Maximum number of redirects of a request.
const MAX_REDIRECTS: u32 = 3;

/// Time limit for a whole file.
const TIME: Duration = Duration::from_secs(10);

/// Hosts whose files are fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WebHosts {
    /// Hosts with public addresses. No client reaches a private network through the server.
    Public,
    /// All hosts.
    All,
}

/// Fetches files from `http` and `https` URLs, within limits of size and time. It sends no
/// credentials and uses no proxy.
#[derive(Debug)]
pub struct WebClient {
    agent: Agent,
    max_bytes: u64,
}

impl WebClient {
    /// Creates a client for files of at most `max_bytes`.
    pub fn new(hosts: WebHosts, max_bytes: u64) -> Self {
        let config = Agent::config_builder()
            .max_redirects(MAX_REDIRECTS)
            .timeout_global(Some(TIME))
            // A proxy would connect to hosts that the resolver does not see.
            .proxy(None)
            .user_agent(concat!("samite/", env!("CARGO_PKG_VERSION")))
            .build();
        let resolver = CheckedResolver {
            hosts,
            names: DefaultResolver::default(),
        };
        WebClient {
            agent: Agent::with_parts(config, DefaultConnector::default(), resolver),
            max_bytes,
        }
    }

    /// Fetches a file.
    ///
    /// # Errors
    /// Returns the reason: a wrong URL, a private address, no answer in time, a status other than
    /// success, or a file that is too large.
    pub fn fetch(&self, url: &str) -> Result<Vec<u8>, String> {
        let response = self.agent.get(url).call();
        let response = response.map_err(|error| match error {
            ureq::Error::Other(error) => error.to_string(),
            error => error.to_string(),
        })?;
        let mut file = Vec::new();
        let body = response.into_body().into_reader();
        body.take(self.max_bytes + 1)
            .read_to_end(&mut file)
            .map_err(|error| error.to_string())?;
        if file.len() as u64 > self.max_bytes {
            return Err(format!("the file has more than {} bytes", self.max_bytes));
        }
        Ok(file)
    }
}

/// Resolves names, also those of redirects, and checks the addresses to which a connection is made.
#[derive(Debug)]
struct CheckedResolver {
    hosts: WebHosts,
    names: DefaultResolver,
}

impl Resolver for CheckedResolver {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let found = self.names.resolve(uri, config, timeout)?;
        let private = found.iter().find(|address| !is_public(address.ip()));
        match private.filter(|_| self.hosts == WebHosts::Public) {
            Some(address) => Err(ureq::Error::Other(
                format!("{} is a private address", address.ip()).into(),
            )),
            None => Ok(found),
        }
    }
}

/// Returns whether an address is one of the public internet (IANA's special-purpose registries).
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let is_special = address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_multicast()
        || address.is_documentation()
        || a == 0
        || a >= 240
        // Shared by customers of a provider, protocol assignments, and benchmarks.
        || a == 100 && (64..128).contains(&b)
        || [a, b, c] == [192, 0, 0]
        || a == 198 && (18..20).contains(&b);
    !is_special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    if let Some(inner) = address.to_ipv4_mapped() {
        return is_public_v4(inner);
    }
    // Global unicast addresses, without those for documentation and those with an IPv4 address in
    // them (Teredo, 6to4).
    let [first, second, ..] = address.segments();
    let is_special = match first {
        0x2001 => second < 0x200 || second == 0xdb8,
        0x2002 | 0x3fff => true,
        _ => false,
    };
    (0x2000..0x4000).contains(&first) && !is_special
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_of_the_internet_are_public() {
        for address in [
            "8.8.8.8",
            "1.1.1.1",
            "100.128.0.1",
            "2606:4700::1111",
            "::ffff:8.8.8.8",
        ] {
            assert!(is_public(address.parse().unwrap()), "{address}");
        }
        for address in [
            "0.0.0.0",
            "10.1.2.3",
            "100.64.0.1",
            "127.0.0.1",
            "169.254.169.254",
            "172.16.0.1",
            "192.168.1.1",
            "192.0.0.8",
            "198.18.0.1",
            "203.0.113.1",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "64:ff9b::7f00:1",
            "fc00::1",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "2001::1",
            "2001:db8::1",
            "2002:7f00:1::",
        ] {
            assert!(!is_public(address.parse().unwrap()), "{address}");
        }
    }
}
