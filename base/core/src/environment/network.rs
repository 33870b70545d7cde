//! Connections to other processes: for devices on other machines.

use std::fmt::Debug;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

/// Makes connections: streams of bytes that arrive complete and in order, as TCP's do.
pub trait Network: Send + Sync + Debug {
    /// Connects to `address`, such as `host:port`.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] after `timeout`; or what the system says.
    fn connect(&self, address: &str, timeout: Duration) -> Result<Box<dyn Connection>>;

    /// Waits for connections at `address`. Port 0 stands for any that is free.
    ///
    /// # Errors
    /// What the system says.
    fn listen(&self, address: &str) -> Result<Box<dyn Listener>>;
}

/// An address at which connections are accepted.
pub trait Listener: Send + Sync + Debug {
    /// The address, with the port that was chosen.
    ///
    /// # Errors
    /// What the system says.
    fn address(&self) -> Result<String>;

    /// Waits for the next connection.
    ///
    /// # Errors
    /// What the system says.
    fn accept(&self) -> Result<Box<dyn Connection>>;
}

/// A stream of bytes each way.
pub trait Connection: Send + Debug {
    /// Sends some of `bytes`, at least one, and returns how many.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if the other side takes none for longer than the [timeout](Connection::set_timeout); or what the system says.
    fn send(&mut self, bytes: &[u8]) -> Result<usize>;

    /// Receives at least one byte, if `buffer` has room, and returns how many; 0 when the other side has closed.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if nothing comes for longer than the [timeout](Connection::set_timeout); or what the system says.
    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize>;

    /// Sets how long [`send`](Connection::send) and [`receive`](Connection::receive) may wait. `None`, as at first, is for ever.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a timeout of zero; or what the system says.
    fn set_timeout(&mut self, timeout: Option<Duration>) -> Result<()>;
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

/// Turns off Nagle's algorithm, which holds a small message back until more is sent: who waits for an answer sends nothing more.
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
}

/// Calls again after a signal. Unix reports a timeout as [`ErrorKind::WouldBlock`], Windows as [`ErrorKind::TimedOut`]: here it is always the latter.
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
    fn bytes_go_both_ways_until_one_side_closes() {
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
    fn silence_ends_with_a_timeout() {
        let listener = SystemNetwork.listen("127.0.0.1:0").unwrap();
        let address = listener.address().unwrap();
        let mut client = SystemNetwork.connect(&address, LONG).unwrap();
        let _server = listener.accept().unwrap();
        client.set_timeout(Some(SHORT)).unwrap();
        let silence = client.receive(&mut [0]).unwrap_err();
        assert_eq!(silence.kind(), ErrorKind::TimedOut);
        // Nobody takes what is sent.
        let full = loop {
            if let Err(error) = client.send(&[0; 1 << 16]) {
                break error;
            }
        };
        assert_eq!(full.kind(), ErrorKind::TimedOut);
        assert!(client.set_timeout(Some(Duration::ZERO)).is_err());
    }

    #[test]
    fn nobody_there_is_an_error() {
        let listener = SystemNetwork.listen("127.0.0.1:0").unwrap();
        let address = listener.address().unwrap();
        drop(listener);
        assert!(SystemNetwork.connect(&address, LONG).is_err());
        assert!(SystemNetwork.connect("no port", LONG).is_err());
    }
}
