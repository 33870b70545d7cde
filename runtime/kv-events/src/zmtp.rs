//! ZMTP 3.0, ZeroMQ's protocol over TCP, as far as a server needs it.
//!
//! Lengths from a peer are validated before memory is allocated.
//!
//! Source: <https://rfc.zeromq.org/spec/23/>.

use std::io::{Error, ErrorKind, Result};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Length of the greeting.
const GREETING: usize = 64;
/// Maximum length of a peer's frame: topics, requests and READY commands are short.
pub const MAX_FRAME: u64 = 4096;
/// Maximum number of frames in a peer's message.
const MAX_PARTS: usize = 8;

/// A command or message from a peer.
#[derive(Debug, PartialEq, Eq)]
pub enum Received {
    /// A command: its name's length, its name, and data.
    Command(Vec<u8>),
    /// A message of one or several frames.
    Message(Vec<Vec<u8>>),
}

fn wrong(what: &str) -> Error {
    Error::new(ErrorKind::InvalidData, what.to_owned())
}

/// Appends a frame.
fn push_frame(out: &mut Vec<u8>, flags: u8, bytes: &[u8]) {
    match u8::try_from(bytes.len()) {
        Ok(length) => out.extend([flags, length]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend((bytes.len() as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(bytes);
}

/// Encodes a message with these parts.
pub fn message(parts: &[&[u8]]) -> Vec<u8> {
    let mut out = Vec::new();
    for (number, part) in parts.iter().enumerate() {
        let flags = if number + 1 < parts.len() { MORE } else { 0 };
        push_frame(&mut out, flags, part);
    }
    out
}

/// Receives a command or message.
///
/// # Errors
/// [`ErrorKind::InvalidData`] for frames that are too long or too many; errors of the connection.
pub async fn receive(stream: &mut (impl AsyncRead + Unpin)) -> Result<Received> {
    let mut parts = Vec::new();
    loop {
        let flags = stream.read_u8().await?;
        let length = match flags & LONG {
            0 => stream.read_u8().await?.into(),
            _ => stream.read_u64().await?,
        };
        if flags & !(MORE | LONG | COMMAND) != 0 || length > MAX_FRAME {
            return Err(wrong("a frame is too long, or has unknown flags"));
        }
        let mut bytes = vec![0; length as usize];
        stream.read_exact(&mut bytes).await?;
        if flags & COMMAND != 0 {
            return Ok(Received::Command(bytes));
        }
        parts.push(bytes);
        if flags & MORE == 0 {
            return Ok(Received::Message(parts));
        }
        if parts.len() >= MAX_PARTS {
            return Err(wrong("a message has too many parts"));
        }
    }
}

/// Exchanges greetings and READY commands with a peer, as a socket of type `own`.
///
/// # Errors
/// [`ErrorKind::InvalidData`] if the peer uses another protocol, version or mechanism, or its
/// socket type is not one of `peers`; errors of the connection.
pub async fn handshake<S>(stream: &mut S, own: &str, peers: &[&str]) -> Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    stream.write_all(&greeting()).await?;
    let mut theirs = [0; GREETING];
    stream.read_exact(&mut theirs).await?;
    // Signature, version 3, and the mechanism without encryption.
    let mechanism = theirs[12..32].split(|byte| *byte == 0).next();
    if theirs[0] != 0xff || theirs[9] & 1 != 1 || theirs[10] < 3 || mechanism != Some(b"NULL") {
        return Err(wrong("the peer does not speak ZMTP 3 without encryption"));
    }
    stream.write_all(&ready(own)).await?;
    let Received::Command(command) = receive(stream).await? else {
        return Err(wrong("a message comes before READY"));
    };
    let theirs = command.strip_prefix(b"\x05READY").and_then(socket_type);
    let theirs = theirs.ok_or_else(|| wrong("READY has no socket type"))?;
    if !peers.iter().any(|peer| theirs == peer.as_bytes()) {
        return Err(wrong("the peer's socket type does not fit"));
    }
    Ok(())
}

/// Returns the greeting for version 3.0 and the NULL mechanism.
pub fn greeting() -> [u8; GREETING] {
    let mut bytes = [0; GREETING];
    bytes[0] = 0xff;
    bytes[9] = 0x7f;
    bytes[10] = 3;
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

/// Returns the READY command of a socket of this type.
pub fn ready(socket_type: &str) -> Vec<u8> {
    let mut body = b"\x05READY\x0bSocket-Type".to_vec();
    body.extend((socket_type.len() as u32).to_be_bytes());
    body.extend(socket_type.as_bytes());
    let mut out = Vec::new();
    push_frame(&mut out, COMMAND, &body);
    out
}

/// Returns the value of `Socket-Type` in the properties of a READY command.
fn socket_type(mut properties: &[u8]) -> Option<&[u8]> {
    loop {
        let (length, rest) = properties.split_first()?;
        let (name, rest) = rest.split_at_checked(usize::from(*length))?;
        let (length, rest) = rest.split_first_chunk()?;
        let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
        let (value, rest) = rest.split_at_checked(length)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Some(value);
        }
        properties = rest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.unwrap().block_on(future)
    }

    fn received(mut bytes: &[u8]) -> Result<Received> {
        block_on(receive(&mut bytes))
    }

    #[test]
    fn messages_round_trip() {
        let long = [7; 300];
        let parts: [&[u8]; 3] = [b"", b"topic", &long];
        let bytes = message(&parts);
        // From the specification: flags, length, body.
        assert_eq!(bytes[..10], *b"\x01\0\x01\x05topic\x02");
        assert_eq!(bytes[10..18], 300u64.to_be_bytes());
        let parts = parts.map(<[u8]>::to_vec).to_vec();
        assert_eq!(received(&bytes).unwrap(), Received::Message(parts));
        let Received::Command(command) = received(&ready("SUB")).unwrap() else {
            panic!("READY is a command");
        };
        assert_eq!(command, b"\x05READY\x0bSocket-Type\0\0\0\x03SUB");
        for end in 0..bytes.len() {
            received(&bytes[..end]).unwrap_err();
        }
    }

    #[test]
    fn frame_lengths_are_checked_before_allocation() {
        for length in [MAX_FRAME + 1, 1 << 40, u64::MAX] {
            let mut bytes = vec![LONG];
            bytes.extend(length.to_be_bytes());
            let error = received(&bytes).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData);
        }
        let error = received(&b"\x01\x01x".repeat(100)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
        assert_eq!(
            received(b"\x80\0").unwrap_err().kind(),
            ErrorKind::InvalidData
        );
    }

    #[test]
    fn any_ready_properties_are_parsed_safely() {
        let type_of = |text: &'static [u8]| socket_type(text);
        assert_eq!(
            type_of(b"\x08Identity\0\0\0\0\x0bSocket-type\0\0\0\x03SUB"),
            Some(&b"SUB"[..])
        );
        for wrong in [
            &b""[..],
            b"\xff",
            b"\x0bSocket-Type",
            b"\x0bSocket-Type\xff\xff\xff\xffSUB",
            b"\x0bSocket-Type\0\0\0\x04SUB",
            b"\x01a\0\0\0\0",
        ] {
            assert_eq!(type_of(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn incompatible_peers_are_refused() {
        let shaken = |greeting: &[u8], ready: &[u8]| {
            let bytes = [greeting, ready].concat();
            block_on(async {
                let (mut own, mut theirs) = tokio::io::duplex(4096);
                theirs.write_all(&bytes).await.unwrap();
                theirs.shutdown().await.unwrap();
                handshake(&mut own, "PUB", &["SUB", "XSUB"]).await
            })
        };
        let broken = |place: usize, byte: u8| {
            let mut greeting = greeting();
            greeting[place] = byte;
            shaken(&greeting, &ready("SUB"))
        };
        for (place, byte) in [(0, 0), (9, 0), (10, 2), (12, b'C')] {
            assert_eq!(
                broken(place, byte).unwrap_err().kind(),
                ErrorKind::InvalidData
            );
        }
        let kind = |bytes: &[u8]| shaken(&greeting(), bytes).unwrap_err().kind();
        assert_eq!(kind(&ready("PULL")), ErrorKind::InvalidData);
        assert_eq!(kind(&message(&[b"x"])), ErrorKind::InvalidData);
        assert_eq!(kind(b""), ErrorKind::UnexpectedEof);
    }
}
