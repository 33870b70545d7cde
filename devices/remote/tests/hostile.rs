//! Unauthorized and greedy clients: they lose their connection or get an error, and no other client
//! is affected.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{Lender, eventually, floats};
use samite_core::{Device, Error, TensorGroup, Usage};
use samite_remote::RemoteOptions;
use samite_testing::{Counter, HANG_GUARD};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Returns the connection error.
fn refused(lender: &Lender, address: &str, options: &RemoteOptions) -> String {
    lender.try_connect(address, options).err().unwrap()
}

fn is_useful(device: &Arc<dyn Device>) {
    assert_eq!(Counter::new(device).unwrap().add(3.0).unwrap(), 3.0);
}

#[test]
fn unauthorized_clients_get_helpful_errors() {
    let lender = Lender::start(|_| {});
    let (address, options) = (&lender.address, lender.options());
    // Another key.
    let place = lender.place();
    let other = format!("samite://{place}#{}", "00".repeat(32));
    let why = refused(&lender, &other, &options);
    assert!(
        why.starts_with("the server has the key") && why.contains("prints now"),
        "{why}"
    );
    // No server, no TLS, an invalid address.
    let nobody = format!("samite://127.0.0.1:1#{}", "00".repeat(32));
    let why = refused(&lender, &nobody, &options);
    assert!(
        why.contains("cannot be reached") && why.contains("remote-server"),
        "{why}"
    );
    let plain = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = plain.local_addr().unwrap();
    std::thread::spawn(move || {
        let (mut client, _) = plain.accept().unwrap();
        client
            .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            .unwrap();
        let _ = client.read(&mut [0; 1024]);
    });
    let why = refused(
        &lender,
        &format!("samite://{at}#{}", "00".repeat(32)),
        &options,
    );
    assert!(why.contains("does not speak TLS"), "{why}");
    assert!(refused(&lender, "127.0.0.1:50052", &options).contains("samite://host:port#key"));
    // A wrong token, none, and a world-readable one.
    let file = lender.folder.path().join("mine");
    let mut mine = options.clone();
    mine.token = Some(file.clone());
    let why = refused(&lender, address, &mine);
    assert!(
        why.contains("mine") && why.contains("--remote-token"),
        "{why}"
    );
    std::fs::write(&file, "ab".repeat(32)).unwrap();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let allow = |mode| std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(&file, allow(0o644)).unwrap();
        assert!(refused(&lender, address, &mine).contains("chmod 600"));
        std::fs::set_permissions(&file, allow(0o600)).unwrap();
    }
    for attempt in 0..5 {
        let start = Instant::now();
        let why = refused(&lender, address, &mine);
        assert!(why.contains("does not know the token"), "{why}");
        // Repeated guesses are answered slowly.
        assert!(attempt < 3 || start.elapsed() > Duration::from_millis(900));
    }
    assert_eq!(lender.server.sessions(), 0);
    is_useful(&lender.connect());
}

/// Returns true if the other side closed the connection: reading ended before its timeout.
fn is_closed(end: &std::io::Result<usize>) -> bool {
    use std::io::ErrorKind::{TimedOut, WouldBlock};
    !matches!(end, Err(error) if matches!(error.kind(), TimedOut | WouldBlock))
}

#[test]
fn silent_and_garbage_connections_are_closed() {
    let lender = Lender::start(|options| options.handshake = Duration::from_secs(1));
    let device = lender.connect();
    for bytes in [
        &b""[..],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        &[0x16; 5000],
        &[0x16, 3, 1, 0xff],
    ] {
        let mut slow = TcpStream::connect(lender.place()).unwrap();
        slow.set_read_timeout(Some(HANG_GUARD)).unwrap();
        let _ = slow.write_all(bytes);
        // Possibly an alert, then the end.
        let mut all = Vec::new();
        let end = slow.read_to_end(&mut all);
        assert!(all.len() < 100);
        assert!(is_closed(&end), "{end:?}");
    }
    is_useful(&device);
}

#[test]
fn silent_connections_do_not_block_other_clients() {
    // No timeout ends them.
    let lender = Lender::start(|options| {
        options.handshake = HANG_GUARD;
        options.connections = 8;
    });
    let device = lender.connect();
    let silent: Vec<_> = (0..40)
        .map(|_| TcpStream::connect(lender.place()).unwrap())
        .collect();
    let other = lender.connect();
    for mut silent in silent.into_iter().take(30) {
        silent.set_read_timeout(Some(HANG_GUARD)).unwrap();
        let end = silent.read(&mut [0]);
        assert!(is_closed(&end), "{end:?}");
    }
    is_useful(&other);
    is_useful(&device);
}

#[test]
fn tls_connections_without_requests_are_closed() {
    let lender = Lender::start(|options| options.handshake = Duration::from_secs(1));
    let device = lender.connect();
    #[derive(Debug)]
    struct Any(rustls::crypto::CryptoProvider);
    impl rustls::client::danger::ServerCertVerifier for Any {
        fn verify_server_cert(
            &self,
            _: &rustls::pki_types::CertificateDer<'_>,
            _: &[rustls::pki_types::CertificateDer<'_>],
            _: &rustls::pki_types::ServerName<'_>,
            _: &[u8],
            _: rustls::pki_types::UnixTime,
        ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
            Ok(rustls::client::danger::ServerCertVerified::assertion())
        }
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &rustls::pki_types::CertificateDer<'_>,
            _: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
        }
        fn verify_tls13_signature(
            &self,
            _: &[u8],
            _: &rustls::pki_types::CertificateDer<'_>,
            _: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
        }
        fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
            self.0.signature_verification_algorithms.supported_schemes()
        }
    }
    let provider = rustls::crypto::ring::default_provider();
    let mut config = rustls::ClientConfig::builder_with_provider(Arc::new(provider.clone()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Any(provider)))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let config = Arc::new(config);
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    // Endless headers, in a frame of the maximum size.
    let headers = [
        &preface[..],
        &[0, 0x40, 0, 1, 0, 0, 0, 0, 1],
        &[0x40; 0x4000],
    ]
    .concat();
    for bytes in [&b""[..], preface, &headers] {
        let name = rustls::pki_types::ServerName::try_from("samite").unwrap();
        let mut tls = rustls::ClientConnection::new(Arc::clone(&config), name).unwrap();
        let mut tcp = TcpStream::connect(lender.place()).unwrap();
        tcp.set_read_timeout(Some(HANG_GUARD)).unwrap();
        let mut stream = rustls::Stream::new(&mut tls, &mut tcp);
        let _ = stream.write_all(bytes);
        let _ = stream.flush();
        let mut all = Vec::new();
        let end = stream.read_to_end(&mut all);
        assert!(is_closed(&end), "{end:?}");
        assert!(all.len() < 4096);
    }
    is_useful(&device);
}

#[test]
fn quota_errors_name_the_quota() {
    let lender = Lender::start(|options| {
        options.memory_per_session = Some(1 << 20);
        options.buffers = 8;
        options.graphs = 2;
        options.sessions_per_token = 2;
    });
    let (device, other) = (lender.connect(), lender.connect());
    let why = refused(&lender, &lender.address, &lender.options());
    assert!(why.contains("2 sessions") && why.contains("quota"), "{why}");
    let allocate = |bytes| device.buffer_type().allocate(bytes, Usage::Any);
    match allocate(2 << 20) {
        Err(Error::OutOfMemory { asked, .. }) => assert_eq!(asked, 2 << 20),
        other => panic!("{other:?}"),
    }
    let held = allocate(900 << 10).unwrap();
    assert!(allocate(200 << 10).is_err());
    assert_eq!(device.memory().free, Some((1 << 20) - (900 << 10)));
    drop(held);
    let held: Vec<_> = (0..8).map(|_| allocate(16).unwrap()).collect();
    let error = allocate(16).unwrap_err().to_string();
    assert!(error.contains("8 buffers"), "{error}");
    drop(held);
    let counters: Vec<_> = (0..2).map(|_| Counter::new(&device).unwrap()).collect();
    let error = Counter::new(&device).err().unwrap().to_string();
    assert!(error.contains("2 graphs"), "{error}");
    drop(counters);
    is_useful(&device);
    is_useful(&other);
    drop((device, other));
    eventually("the sessions are over", || lender.server.sessions() == 0);
    eventually("their memory is free", || {
        lender.server.memory_in_use() == 0
    });
    is_useful(&lender.connect());
}

#[test]
fn clients_cannot_access_each_others_memory() {
    let lender = Lender::start(|_| {});
    let (a, b) = (lender.connect(), lender.connect());
    let secret = TensorGroup::allocate(&a.buffer_type(), Usage::Any, &[("x", floats(64))]).unwrap();
    secret.tensors[0].tensor().write(0, &[42; 256]).unwrap();
    // Memory of one device cannot be used with another one's streams.
    let mut stream = Arc::clone(&b).open_stream().unwrap();
    let x = secret.tensors[0].tensor();
    assert!(stream.read(x, 0, &mut [0; 256]).is_err());
    assert!(stream.write(x, 0, &[0; 256]).is_err());
    let mine = TensorGroup::allocate(&b.buffer_type(), Usage::Any, &[("y", floats(64))]).unwrap();
    let mut out = [1; 256];
    mine.tensors[0].tensor().read(0, &mut out).unwrap();
    assert_eq!(out, [0; 256], "memory is zero at first");
}
