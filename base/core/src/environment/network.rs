//! Connections to other processes, for remote devices.

use std::fmt::Debug;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

/// Makes connections: byte streams that are complete and ordered, like TCP's.
pub trait Network: Send + Sync + Debug {
    /// Connects to `address`, such as `host:port`.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] after `timeout`. Otherwise the system's error.
    fn connect(&self, address: &str, timeout: Duration) -> Result<Box<dyn Connection>>;

    /// Listens for connections at `address`. Port 0 selects any free port.
    ///
    /// # Errors
    /// The system's error.
    fn listen(&self, address: &str) -> Result<Box<dyn Listener>>;
}

/// An address at which connections are accepted.
pub trait Listener: Send + Sync + Debug {
    /// Returns the address, with the chosen port.
    ///
    /// # Errors
    /// The system's error.
    fn address(&self) -> Result<String>;

    /// Waits for the next connection.
    ///
    /// # Errors
    /// The system's error.
    fn accept(&self) -> Result<Box<dyn Connection>>;
}

/// A byte stream in each direction.
pub trait Connection: Send + Debug {
    /// Sends some of `bytes`, at least one, and returns their number.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if the peer accepts none for longer than the
    /// [timeout](Connection::set_timeout). Otherwise the system's error.
    fn send(&mut self, bytes: &[u8]) -> Result<usize>;

    /// Receives at least one byte, if `buffer` has room, and returns their number. 0 if the peer
    /// has closed the connection.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if nothing arrives for longer than the
    /// [timeout](Connection::set_timeout). Otherwise the system's error.
    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize>;

    /// Sets the timeout of [`send`](Connection::send) and [`receive`](Connection::receive). `None`,
    /// the default, waits forever.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a timeout of zero. Otherwise the system's error.
    fn set_timeout(&mut self, timeout: Option<Duration>) -> Result<()>;

    /// Returns the peer's address, if known.
    fn peer(&self) -> Option<IpAddr> {
        None
    }

    /// Returns a handle for other threads, if this kind of connection has one.
    fn handle(&self) -> Option<Arc<dyn ConnectionHandle>> {
        None
    }
}

/// A connection handle for another thread, which detects that the peer has left, or closes the
/// connection.
pub trait ConnectionHandle: Send + Sync + Debug {
    /// Returns whether the peer has closed its end. On Linux, this works even if unread bytes are
    /// pending. Consumes no bytes and does not wait. No other thread may use the connection
    /// meanwhile.
    fn has_left(&self) -> bool;

    /// Closes both directions. Waiting calls return, and later ones fail.
    fn shut_down(&self);
}

/// TCP of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemNetwork;

impl Network for SystemNetwork {
    fn connect(&self, address: &str, timeout: Duration) -> Result<Box<dyn Connection>> {
        let mut refusal = Error::new(ErrorKind::NotFound, format!("'{address}' has no address"));
        for address in address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, timeout).and_then(connection) {
                Ok(connection) => return Ok(connection),
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }

    fn listen(&self, address: &str) -> Result<Box<dyn Listener>> {
        Ok(Box::new(TcpListener::bind(address)?))
    }
}

/// Turns off Nagle's algorithm, which delays a small message until more is sent. A peer that waits
/// for a reply sends nothing more.
fn connection(stream: TcpStream) -> Result<Box<dyn Connection>> {
    stream.set_nodelay(true)?;
    Ok(Box::new(stream))
}

impl Listener for TcpListener {
    fn address(&self) -> Result<String> {
        Ok(self.local_addr()?.to_string())
    }

    fn accept(&self) -> Result<Box<dyn Connection>> {
        let (stream, _) = TcpListener::accept(self)?;
        connection(stream)
    }
}

impl Connection for TcpStream {
    fn send(&mut self, bytes: &[u8]) -> Result<usize> {
        retry(|| self.write(bytes))
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize> {
        retry(|| self.read(buffer))
    }

    fn set_timeout(&mut self, timeout: Option<Duration>) -> Result<()> {
        self.set_read_timeout(timeout)?;
        self.set_write_timeout(timeout)
    }

    fn peer(&self) -> Option<IpAddr> {
        self.peer_addr().ok().map(|address| address.ip())
    }

    fn handle(&self) -> Option<Arc<dyn ConnectionHandle>> {
        Some(Arc::new(self.try_clone().ok()?))
    }
}

impl ConnectionHandle for TcpStream {
    fn has_left(&self) -> bool {
        has_left(self)
    }

    fn shut_down(&self) {
        // A closed connection stays closed.
        let _ = self.shutdown(Shutdown::Both);
    }
}

/// The event for a peer that has closed its end. On other systems, only the next read shows it.
#[cfg(any(target_os = "linux", target_os = "android"))]
const PEER_CLOSED: libc::c_short = libc::POLLRDHUP;
#[cfg(all(unix, not(any(target_os = "linux", target_os = "android"))))]
const PEER_CLOSED: libc::c_short = 0;

#[cfg(unix)]
fn has_left(stream: &TcpStream) -> bool {
    use std::os::fd::AsRawFd;
    let fd = stream.as_raw_fd();
    let mut events = libc::pollfd {
        fd,
        events: PEER_CLOSED,
        revents: 0,
    };
    // SAFETY: the descriptor is open while `stream` is borrowed, and the call writes only to one
    // `pollfd`.
    if unsafe { libc::poll(&raw mut events, 1, 0) } > 0 {
        return true;
    }
    if PEER_CLOSED != 0 {
        return false;
    }
    let mut byte = 0u8;
    // SAFETY: the descriptor is open, and the buffer has room for the byte, which stays unread.
    let found = unsafe {
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        libc::recv(fd, (&raw mut byte).cast(), 1, flags)
    };
    let is_transient = |kind| matches!(kind, ErrorKind::WouldBlock | ErrorKind::Interrupted);
    found == 0 || (found < 0 && !is_transient(Error::last_os_error().kind()))
}

#[cfg(not(unix))]
fn has_left(stream: &TcpStream) -> bool {
    if stream.set_nonblocking(true).is_err() {
        return true;
    }
    let found = stream.peek(&mut [0]);
    let is_transient = |kind| matches!(kind, ErrorKind::WouldBlock | ErrorKind::Interrupted);
    let has_left = match found {
        Ok(count) => count == 0,
        Err(error) => !is_transient(error.kind()),
    };
    has_left | stream.set_nonblocking(false).is_err()
}

/// Repeats a call that a signal interrupted. Unix reports a timeout as [`ErrorKind::WouldBlock`],
/// Windows as [`ErrorKind::TimedOut`]. This always reports the latter.
fn retry(mut call: impl FnMut() -> Result<usize>) -> Result<usize> {
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                return Err(ErrorKind::TimedOut.into());
            }
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn bytes_flow_in_both_directions_until_one_side_closes() {
        let listener = SystemNetwork.listen("127.0.0.1:0").unwrap();
        let address = listener.address().unwrap();
        let mut client = SystemNetwork.connect(&address, LONG).unwrap();
        let mut server = listener.accept().unwrap();
        let mut buffer = [0; 8];
        assert_eq!(client.send(b"question").unwrap(), 8);
        server.set_timeout(Some(LONG)).unwrap();
        let got = server.receive(&mut buffer).unwrap();
        assert_eq!(buffer[..got], b"question"[..got]);
        server.send(b"!").unwrap();
        drop(server);
        client.set_timeout(Some(LONG)).unwrap();
        assert_eq!(client.receive(&mut buffer).unwrap(), 1);
        assert_eq!(buffer[0], b'!');
        assert_eq!(client.receive(&mut buffer).unwrap(), 0);
    }

    #[test]
    fn silent_peers_cause_a_timeout() {
        let listener = SystemNetwork.listen("127.0.0.1:0").unwrap();
        let address = listener.address().unwrap();
        let mut client = SystemNetwork.connect(&address, LONG).unwrap();
        let _server = listener.accept().unwrap();
        client.set_timeout(Some(SHORT)).unwrap();
        let silence = client.receive(&mut [0]).unwrap_err();
        assert_eq!(silence.kind(), ErrorKind::TimedOut);
        // The peer does not read.
        let full = loop {
            if let Err(error) = client.send(&[0; 1 << 16]) {
                break error;
            }
        };
        assert_eq!(full.kind(), ErrorKind::TimedOut);
        assert!(client.set_timeout(Some(Duration::ZERO)).is_err());
    }

    #[test]
    fn a_handle_detects_a_departed_peer_and_closes_the_connection() {
        let listener = SystemNetwork.listen("127.0.0.1:0").unwrap();
        let address = listener.address().unwrap();
        let mut client = SystemNetwork.connect(&address, LONG).unwrap();
        let mut server = listener.accept().unwrap();
        assert_eq!(server.peer(), Some(IpAddr::from([127, 0, 0, 1])));
        let handle = server.handle().unwrap();
        assert!(!handle.has_left());
        client.send(b"unread").unwrap();
        assert!(!handle.has_left());
        drop(client);
        let start = std::time::Instant::now();
        if cfg!(target_os = "linux") {
            while !handle.has_left() {
                assert!(start.elapsed() < LONG, "it never learns");
            }
        }
        let mut buffer = [0; 8];
        assert_eq!(server.receive(&mut buffer).unwrap(), 6, "bytes stay");
        while !handle.has_left() {
            assert!(start.elapsed() < LONG, "it never learns");
        }
        let mut client = SystemNetwork.connect(&address, LONG).unwrap();
        let server = listener.accept().unwrap();
        let handle = server.handle().unwrap();
        let other = std::thread::spawn(move || {
            let mut server = server;
            server.receive(&mut [0])
        });
        handle.shut_down();
        assert_eq!(other.join().unwrap().unwrap(), 0);
        client.set_timeout(Some(LONG)).unwrap();
        assert_eq!(client.receive(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn connecting_without_a_listener_is_an_error() {
        let listener = SystemNetwork.listen("127.0.0.1:0").unwrap();
        let address = listener.address().unwrap();
        drop(listener);
        assert!(SystemNetwork.connect(&address, LONG).is_err());
        assert!(SystemNetwork.connect("no port", LONG).is_err());
    }
}
