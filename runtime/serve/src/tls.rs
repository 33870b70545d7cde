//! TLS connections.

use crate::options::TlsFiles;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::server::TlsStream;

/// Time limit of the handshake.
const TIME: Duration = Duration::from_secs(10);

/// The server's certificate and key.
pub struct Tls(TlsAcceptor);

impl Tls {
    /// Reads the certificate files.
    pub fn new(files: &TlsFiles) -> io::Result<Self> {
        let wrong = |flag: &str, path: &std::path::Path, error: &dyn std::fmt::Display| {
            let message = format!("{flag}: {}: {error}", path.display());
            io::Error::new(io::ErrorKind::InvalidInput, message)
        };
        let (certificate, key) = (&files.certificate, &files.key);
        let wrong_certificate =
            |error: &dyn std::fmt::Display| wrong("--ssl-cert-file", certificate, error);
        let wrong_key = |error: &dyn std::fmt::Display| wrong("--ssl-key-file", key, error);
        let chain = CertificateDer::pem_file_iter(certificate)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(|error| wrong_certificate(&error))?;
        if chain.is_empty() {
            return Err(wrong_certificate(&"there is no certificate in it"));
        }
        let secret = PrivateKeyDer::from_pem_file(key).map_err(|error| wrong_key(&error))?;
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_no_client_auth()
            .with_single_cert(chain, secret)
            .map_err(|error| wrong_key(&error))?;
        Ok(Tls(TlsAcceptor::from(Arc::new(config))))
    }

    /// Performs the handshake with a client.
    pub async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        match tokio::time::timeout(TIME, self.0.accept(stream)).await {
            Ok(accepted) => accepted,
            Err(_) => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the client did not answer in time",
            )),
        }
    }
}
