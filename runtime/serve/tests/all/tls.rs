//! Encrypted connections with a self-signed certificate.

use crate::common::Server;
use samite_requests::EngineOptions;
use samite_serve::{ServeOptions, TlsFiles};
use samite_testing::HANG_GUARD;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// Writes a certificate for this machine and its key.
fn files(folder: &Path) -> (TlsFiles, CertificateDer<'static>) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let files = TlsFiles {
        certificate: folder.join("certificate.pem"),
        key: folder.join("key.pem"),
    };
    std::fs::write(&files.certificate, made.cert.pem()).unwrap();
    std::fs::write(&files.key, made.signing_key.serialize_pem()).unwrap();
    (files, made.cert.der().clone())
}

fn start(files: TlsFiles) -> Server {
    let options = ServeOptions {
        tls: Some(files),
        ..ServeOptions::default()
    };
    Server::start(options, EngineOptions::default())
}

#[test]
fn connections_are_encrypted() {
    let folder = tempfile::tempdir().unwrap();
    let (files, certificate) = files(folder.path());
    let server = start(files);
    let mut roots = RootCertStore::empty();
    roots.add(certificate).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(
        tokio_rustls::rustls::crypto::ring::default_provider(),
    ))
    .with_safe_default_protocol_versions()
    .unwrap()
    .with_root_certificates(roots)
    .with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    let client = ClientConnection::new(Arc::new(config), name).unwrap();
    let socket = TcpStream::connect(&server.address).unwrap();
    let mut stream = StreamOwned::new(client, socket);
    let body = r#"{"prompt": "Once", "n_predict": 3, "stream": true}"#;
    write!(
        stream,
        "POST /completion HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text);
    assert!(
        text.starts_with("HTTP/1.1 200") && text.contains("\"stop\":true"),
        "{text}"
    );
}

#[test]
fn plaintext_clients_are_refused_and_others_served() {
    let folder = tempfile::tempdir().unwrap();
    let (files, _) = files(folder.path());
    let server = start(files);
    // A silent connection does not block others.
    let _silent = TcpStream::connect(&server.address).unwrap();
    let mut plain = TcpStream::connect(&server.address).unwrap();
    plain.set_read_timeout(Some(HANG_GUARD)).unwrap();
    plain
        .write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    assert!(
        !String::from_utf8_lossy(&answer).contains("ok"),
        "{answer:?}"
    );
}

#[test]
fn silent_clients_are_closed_before_the_tls_handshake() {
    let folder = tempfile::tempdir().unwrap();
    let (files, _) = files(folder.path());
    let options = ServeOptions {
        tls: Some(files),
        connections: Some(4),
        head_seconds: 1000,
        ..ServeOptions::default()
    };
    let server = Server::start(options, EngineOptions::default());
    let mut silent: Vec<TcpStream> = (0..20)
        .map(|_| TcpStream::connect(&server.address).unwrap())
        .collect();
    let mut first = silent.remove(0);
    first.set_read_timeout(Some(HANG_GUARD)).unwrap();
    assert_eq!(first.read(&mut [0]).unwrap(), 0);
}

#[test]
fn a_missing_tls_handshake_times_out() {
    let folder = tempfile::tempdir().unwrap();
    let (files, _) = files(folder.path());
    let options = ServeOptions {
        tls: Some(files),
        head_seconds: 1,
        ..ServeOptions::default()
    };
    let server = Server::start(options, EngineOptions::default());
    let mut silent = TcpStream::connect(&server.address).unwrap();
    silent.set_read_timeout(Some(HANG_GUARD)).unwrap();
    assert_eq!(silent.read(&mut [0]).unwrap(), 0);
}

#[test]
fn an_unusable_certificate_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (good, _) = files(folder.path());
    let broken = folder.path().join("broken.pem");
    std::fs::write(&broken, "no").unwrap();
    for (files, part) in [
        (
            TlsFiles {
                certificate: broken.clone(),
                key: good.key.clone(),
            },
            "--ssl-cert-file",
        ),
        (
            TlsFiles {
                certificate: good.certificate.clone(),
                key: broken.clone(),
            },
            "--ssl-key-file",
        ),
        (
            TlsFiles {
                certificate: folder.path().join("none"),
                key: good.key.clone(),
            },
            "--ssl-cert-file",
        ),
        (
            TlsFiles {
                certificate: good.certificate.clone(),
                key: good.certificate.clone(),
            },
            "--ssl-key-file",
        ),
    ] {
        let options = ServeOptions {
            tls: Some(files),
            ..crate::common::served(ServeOptions::default())
        };
        let (app, driver) = crate::common::app(options, EngineOptions::default());
        let hub = Arc::new(samite_serve::Hub::single(app));
        let error = samite_serve::serve(Arc::clone(&hub), &samite_core::CancelToken::new(), |_| {});
        let error = error.unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
        hub.end();
        driver.join().unwrap();
    }
}
