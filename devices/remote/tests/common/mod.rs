//! A server, and a proxy between it and a client.
#![allow(clippy::unwrap_used, dead_code, missing_docs)]

use samite_core::{Backend, DType, Device, Layout};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_remote::{RemoteBackend, RemoteOptions, RemoteServer, RemoteServerOptions};
pub use samite_testing::wait_until as eventually;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

pub struct Lender {
    pub folder: tempfile::TempDir,
    pub server: Arc<RemoteServer>,
    pub address: String,
}

impl Lender {
    pub fn start(change: impl FnOnce(&mut RemoteServerOptions)) -> Self {
        let device = ReferenceDevice::new(ReferenceOptions::default());
        Self::with_devices(&[device], change)
    }

    pub fn with_devices(
        devices: &[Arc<dyn Device>],
        change: impl FnOnce(&mut RemoteServerOptions),
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let [key, tokens] = ["key", "tokens"].map(|name| folder.path().join(name));
        let mut options = RemoteServerOptions::new(key, tokens);
        options.store = Some(folder.path().join("store"));
        change(&mut options);
        let server = Arc::new(RemoteServer::bind(devices, "127.0.0.1:0", options).unwrap());
        let address = server.address().unwrap();
        let serving = Arc::clone(&server);
        std::thread::spawn(move || serving.serve());
        Lender {
            folder,
            server,
            address,
        }
    }

    pub fn tokens(&self) -> PathBuf {
        self.folder.path().join("tokens")
    }

    pub fn place(&self) -> String {
        let rest = self.address.strip_prefix("samite://").unwrap();
        rest.split('#').next().unwrap().to_owned()
    }

    pub fn options(&self) -> RemoteOptions {
        RemoteOptions {
            token: Some(self.tokens()),
            ..RemoteOptions::default()
        }
    }

    /// Returns the devices, or the connection error.
    pub fn try_connect(
        &self,
        address: &str,
        options: &RemoteOptions,
    ) -> Result<Arc<dyn Device>, String> {
        let backend = RemoteBackend::connect(&[address], options);
        match backend.rejected().first() {
            Some(rejected) => Err(rejected.why.clone()),
            None => Ok(Arc::clone(&backend.devices()[0])),
        }
    }

    pub fn connect(&self) -> Arc<dyn Device> {
        self.try_connect(&self.address, &self.options()).unwrap()
    }
}

pub fn floats(n: usize) -> Layout {
    Layout::contiguous(DType::F32, [n, 1, 1, 1]).unwrap()
}

/// A proxy that breaks connections.
pub struct Proxy {
    pub place: String,
    /// Number of bytes that pass before the connection breaks.
    pub left: Arc<AtomicUsize>,
    /// True if new connections are rejected.
    pub is_shut: Arc<AtomicBool>,
    pub connections: Arc<AtomicUsize>,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Proxy {
    pub fn start(to: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Proxy {
            place: listener.local_addr().unwrap().to_string(),
            left: Arc::new(AtomicUsize::new(usize::MAX)),
            is_shut: Arc::default(),
            connections: Arc::default(),
            open: Arc::default(),
        };
        let (left, is_shut) = (Arc::clone(&proxy.left), Arc::clone(&proxy.is_shut));
        let (connections, open) = (Arc::clone(&proxy.connections), Arc::clone(&proxy.open));
        std::thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                if is_shut.load(Ordering::SeqCst) {
                    continue;
                }
                connections.fetch_add(1, Ordering::SeqCst);
                let server = TcpStream::connect(&to).unwrap();
                for stream in [&client, &server] {
                    stream.set_nodelay(true).unwrap();
                    open.lock().unwrap().push(stream.try_clone().unwrap());
                }
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let left = Arc::clone(&left);
                    std::thread::spawn(move || {
                        let mut bytes = vec![0; 1 << 14];
                        loop {
                            let n = from.read(&mut bytes).unwrap_or(0);
                            let before = left.load(Ordering::SeqCst);
                            if before != usize::MAX {
                                left.fetch_sub(n.min(before), Ordering::SeqCst);
                            }
                            let passed = n.min(before);
                            if n == 0 || to.write_all(&bytes[..passed]).is_err() || passed < n {
                                let _ = from.shutdown(std::net::Shutdown::Both);
                                let _ = to.shutdown(std::net::Shutdown::Both);
                                left.store(usize::MAX, Ordering::SeqCst);
                                return;
                            }
                        }
                    });
                }
            }
        });
        proxy
    }

    /// Returns the server's address through this proxy.
    pub fn address(&self, of: &str) -> String {
        format!("samite://{}#{}", self.place, of.split('#').nth(1).unwrap())
    }

    pub fn cut(&self) {
        for stream in self.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}
