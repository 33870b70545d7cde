//! Identities: the server's key, the clients' tokens, and the server's address.

use ring::{digest, hmac};
use std::fmt;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::path::{Path, PathBuf};

/// Default port of servers.
pub(crate) const PORT: u16 = 50053;

/// Name of the token file in the folder for settings.
pub const TOKEN_FILE: &str = "remote-token";

/// Name of the key file in the folder for settings.
pub const KEY_FILE: &str = "remote-key";

/// Bytes of a token.
const TOKEN: usize = 32;

/// Maximum number of tokens per file.
const MAX_TOKENS: usize = 256;

/// Prefix of addresses.
const SCHEME: &str = "samite://";

/// Keying material exported from TLS, known only to both sides.
pub(crate) type Exported = [u8; 32];

/// Label of the export.
pub(crate) const EXPORTER: &[u8] = b"EXPORTER-samite-remote";

/// Prefix of the message that a token signs. The exported material follows it.
const ROLE: &[u8] = b"samite client 1";

/// SHA-256 hash of a key, as part of an address.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pin([u8; 32]);

impl Pin {
    /// Hashes a certificate's SubjectPublicKeyInfo.
    pub fn from_spki(spki: &[u8]) -> Self {
        let hash = digest::digest(&digest::SHA256, spki);
        let mut pin = [0; 32];
        pin.copy_from_slice(hash.as_ref());
        Pin(pin)
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Location and key of a server: `samite://host:port#key`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    /// Host and port.
    pub place: String,
    pub pin: Pin,
}

impl Address {
    /// Parses an address. Error messages say what to do.
    pub fn parse(text: &str) -> std::result::Result<Self, String> {
        let wrong = |what: &str| {
            Err(format!(
                "{what}: an address is samite://host:port#key, as the server prints it at its start"
            ))
        };
        let Some(rest) = text.trim().strip_prefix(SCHEME) else {
            return wrong("it does not begin with samite://");
        };
        let Some((place, key)) = rest.split_once('#') else {
            return wrong("it has no key behind '#'");
        };
        let Some(pin) = unhex(key) else {
            return wrong("the key behind '#' is not 64 hexadecimal digits");
        };
        let place = place.trim_end_matches('/');
        let has_port = place
            .rsplit_once(':')
            .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
        let is_v6 = place.starts_with('[') && place.ends_with(']');
        match place {
            "" => wrong("it has no host"),
            _ if has_port && !is_v6 => Ok(Address {
                place: place.to_owned(),
                pin: Pin(pin),
            }),
            _ if !place.contains(':') || is_v6 => Ok(Address {
                place: format!("{place}:{PORT}"),
                pin: Pin(pin),
            }),
            _ => wrong("its port is no number"),
        }
    }
}

/// Formats the address of a server.
pub(crate) fn address(place: &str, pin: Pin) -> String {
    format!("{SCHEME}{place}#{pin}")
}

/// A client's credential.
#[derive(Clone)]
pub(crate) struct ClientToken {
    key: hmac::Key,
    /// Name in logs and on disk, which does not reveal the token.
    pub name: String,
}

impl fmt::Debug for ClientToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClientToken({})", self.name)
    }
}

impl ClientToken {
    fn new(bytes: &[u8; TOKEN]) -> Self {
        let mut name = b"samite token ".to_vec();
        name.extend(bytes);
        let name = digest::digest(&digest::SHA256, &name);
        ClientToken {
            key: hmac::Key::new(hmac::HMAC_SHA256, bytes),
            name: hex(&name.as_ref()[..8]),
        }
    }

    /// Returns the proof for one connection.
    pub fn proof(&self, exported: &Exported) -> String {
        hex(hmac::sign(&self.key, &signed(exported)).as_ref())
    }

    /// Returns whether this token made a proof. The time does not depend on the proof.
    pub fn made(&self, proof: &[u8; 32], exported: &Exported) -> bool {
        hmac::verify(&self.key, &signed(exported), proof).is_ok()
    }
}

fn signed(exported: &Exported) -> Vec<u8> {
    [ROLE, exported].concat()
}

/// Formats bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Parses 64 hexadecimal digits.
pub(crate) fn unhex(text: &str) -> Option<[u8; 32]> {
    let digits = text.as_bytes();
    if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(bytes)
}

/// Returns random bytes.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    fill_random(&mut bytes)?;
    Ok(bytes)
}

/// Fills `bytes` with random bytes.
pub(crate) fn fill_random(bytes: &mut [u8]) -> Result<()> {
    ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), bytes)
        .map_err(|_| Error::other("the system has no random numbers"))
}

/// Returns the default folder of keys and tokens: `samite` in the user's folder for settings.
pub fn settings_folder() -> Option<PathBuf> {
    let path = |name| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let folder = if cfg!(windows) {
        path("APPDATA")?
    } else {
        path("XDG_CONFIG_HOME").or_else(|| Some(path("HOME")?.join(".config")))?
    };
    Some(folder.join("samite"))
}

/// Reads the tokens of a file: 64 hexadecimal digits each, one per line. Ignores empty lines and
/// lines that start with '#'.
pub(crate) fn read_tokens(path: &Path) -> Result<Vec<ClientToken>> {
    let text = String::from_utf8(read_secret(path)?);
    let text = text.map_err(|_| invalid(path, "it is no text"))?;
    let lines = text.lines().map(str::trim);
    let mut tokens = Vec::new();
    for (number, line) in (1..).zip(lines) {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let bytes = unhex(line)
            .ok_or_else(|| invalid(path, &format!("line {number} is not 64 hexadecimal digits")))?;
        if tokens.len() == MAX_TOKENS {
            return Err(invalid(
                path,
                &format!("it has more than {MAX_TOKENS} tokens"),
            ));
        }
        tokens.push(ClientToken::new(&bytes));
    }
    if tokens.is_empty() {
        Err(invalid(path, "it has no token"))
    } else {
        Ok(tokens)
    }
}

/// Reads the tokens of a file. If the file does not exist, creates it with one token.
pub(crate) fn tokens_or_new(path: &Path) -> Result<Vec<ClientToken>> {
    if !path.exists() {
        let token = hex(&random::<TOKEN>()?);
        write_secret(path, format!("{token}\n").as_bytes())?;
    }
    read_tokens(path)
}

/// Reads a file that only its owner may be able to read.
pub(crate) fn read_secret(path: &Path) -> Result<Vec<u8>> {
    let named = |error: Error| Error::new(error.kind(), format!("{}: {error}", path.display()));
    let about = std::fs::metadata(path).map_err(named)?;
    if !about.is_file() || about.len() > 1 << 16 {
        return Err(invalid(path, "it is no small file"));
    }
    let mut file = std::fs::File::open(path).map_err(named)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // Check the open file, because another one may have the name by now.
        let about = file.metadata().map_err(named)?;
        if !samite_core::environment::is_own(&about) {
            return Err(invalid(path, "it belongs to another user"));
        }
        if about.permissions().mode() & 0o077 != 0 {
            let advice = format!("others can read it: chmod 600 {}", path.display());
            return Err(invalid(path, &advice));
        }
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(named)?;
    Ok(bytes)
}

/// Creates a file that only its owner can read. Keeps a file that another process created
/// meanwhile.
pub(crate) fn write_secret(path: &Path, bytes: &[u8]) -> Result<()> {
    let named = |error: Error| Error::new(error.kind(), format!("{}: {error}", path.display()));
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(named)?;
    }
    // Another server may start at the same time, so the file must appear complete or not at all.
    // The name is random, so that no other program can have the file open or have placed a link
    // there.
    let name = format!("{}.{}.new", path.display(), hex(&random::<8>()?));
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(&name).map_err(named)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    let linked = written.and_then(|()| std::fs::hard_link(&name, path));
    let _ = std::fs::remove_file(&name);
    match linked {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(named(error)),
        _ => Ok(()),
    }
}

fn invalid(path: &Path, why: &str) -> Error {
    Error::new(ErrorKind::InvalidData, format!("{}: {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let key = "0123456789abcdef".repeat(4);
        let parse = |text: &str| Address::parse(&text.replace("KEY", &key));
        let place = |text: &str| parse(text).unwrap().place;
        assert_eq!(place("samite://host:7#KEY"), "host:7");
        assert_eq!(place("samite://host#KEY"), "host:50053");
        assert_eq!(place("samite://[::1]#KEY"), "[::1]:50053");
        assert_eq!(place("samite://[::1]:9/#KEY"), "[::1]:9");
        let address = parse("samite://host:7#KEY").unwrap();
        assert_eq!(
            super::address(&address.place, address.pin),
            format!("samite://host:7#{key}")
        );
        for wrong in [
            "host:7#KEY",
            "samite://host:7",
            "samite://host:7#12",
            "samite://#KEY",
            "samite://host:x#KEY",
            "samite://:7#KEY",
        ] {
            let error = parse(wrong).unwrap_err();
            assert!(error.contains("samite://host:port#key"), "{wrong}: {error}");
        }
    }

    #[test]
    fn proofs_are_bound_to_one_token_and_connection() {
        let [a, b] = [[1; 32], [2; 32]].map(|bytes| ClientToken::new(&bytes));
        let proof = unhex(&a.proof(&[7; 32])).unwrap();
        assert!(a.made(&proof, &[7; 32]));
        assert!(!a.made(&proof, &[8; 32]) && !b.made(&proof, &[7; 32]));
        assert_ne!(a.name, b.name);
    }

    #[test]
    fn token_files_are_created_and_validated() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/token");
        let made = tokens_or_new(&path).unwrap();
        assert_eq!(made[0].name, tokens_or_new(&path).unwrap()[0].name);
        let error = |text: &str| {
            std::fs::write(&path, text).unwrap();
            read_tokens(&path).unwrap_err().to_string()
        };
        assert!(error("# none\n\n").contains("no token"));
        assert!(error("# x\nabc").contains("line 2"));
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let open = std::fs::Permissions::from_mode(0o644);
            std::fs::set_permissions(&path, open).unwrap();
            assert!(error(&"ab".repeat(32)).contains("chmod 600"));
        }
    }
}
