//! TLS 1.3 between known peers: the server has one permanent key, and its address names that key.

use crate::identity::{self, EXPORTER, Exported, Pin};
use rcgen::{CertificateParams, KeyPair};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{ClientConfig, DigitallySignedStruct, ServerConfig, SignatureScheme};
use std::io::{Error, ErrorKind, Result};
use std::path::Path;
use std::sync::Arc;

/// Name in certificates. It is not checked.
const NAME: &str = "samite";

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn bad(error: impl std::fmt::Display) -> Error {
    Error::other(error.to_string())
}

/// Returns the server's configuration with the key of `path`, which is created if it does not
/// exist.
pub(crate) fn server(path: &Path) -> Result<(Arc<ServerConfig>, Pin)> {
    if !path.exists() {
        let key = KeyPair::generate().map_err(bad)?;
        identity::write_secret(path, &key.serialize_der())?;
    }
    let der = identity::read_secret(path)?;
    let wrong = |error: rcgen::Error| {
        let text = format!(
            "{}: it is no private key ({error}): remove it for a new one, and give clients the new address",
            path.display()
        );
        Error::new(ErrorKind::InvalidData, text)
    };
    let key = KeyPair::try_from(&*der).map_err(wrong)?;
    let certificate = CertificateParams::new([NAME.to_owned()])
        .and_then(|parameters| parameters.self_signed(&key))
        .map_err(bad)?;
    let certificate = certificate.der().clone();
    let pin = pin_of(&certificate).map_err(bad)?;
    let key = PrivateKeyDer::try_from(der).map_err(bad)?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(bad)?
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .map_err(bad)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok((Arc::new(config), pin))
}

/// Returns the client's configuration, which accepts only the key with this hash.
pub(crate) fn client(pin: Pin) -> Result<Arc<ClientConfig>> {
    let provider = provider();
    let verifier = Pinned {
        pin,
        provider: Arc::clone(&provider),
    };
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(bad)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

/// Returns the server name that clients request.
pub(crate) fn server_name() -> Result<ServerName<'static>> {
    ServerName::try_from(NAME).map_err(bad)
}

/// Returns keying material that only both sides of a connection know.
pub(crate) fn exported<T>(connection: &rustls::ConnectionCommon<T>) -> Result<Exported> {
    connection
        .export_keying_material([0; 32], EXPORTER, None)
        .map_err(bad)
}

fn pin_of(certificate: &CertificateDer<'_>) -> std::result::Result<Pin, rustls::Error> {
    let certificate = ParsedCertificate::try_from(certificate)?;
    Ok(Pin::from_spki(&certificate.subject_public_key_info()))
}

/// Accepts a single key, whatever else its certificate says.
#[derive(Debug)]
struct Pinned {
    pin: Pin,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        let pin = pin_of(end_entity)?;
        if pin != self.pin {
            return Err(rustls::Error::General(format!(
                "the server has the key {pin}, not the one behind '#': if it was set up anew, use the address that it prints now; otherwise it is somebody else"
            )));
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.3 is spoken only".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}
