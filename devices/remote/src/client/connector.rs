//! Connections over TCP, TLS and gRPC.

use super::RemoteOptions;
use super::endpoint::{Endpoint, SharedEndpoint};
use super::link::{LinkConnector, Links, Opening, RefusalKind, Refused, Replies, broke, refused};
use crate::environment::System;
use crate::identity::{Address, ClientToken};
use crate::proto::{self, remote_client::RemoteClient};
use crate::server::MAX_MESSAGE;
use crate::tls;
use hyper_util::rt::TokioIo;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_rustls::TlsConnector;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::Channel;

/// Starts a session, which a separate thread keeps alive. Also returns the server's devices. Error
/// messages say what to do.
pub(super) fn connect(
    address: Address,
    token: ClientToken,
    options: &RemoteOptions,
) -> Result<(Arc<Endpoint>, Vec<proto::Device>), String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| error.to_string())?;
    let place = address.place.clone();
    let links = links(address, token, options, runtime.handle().clone());
    let (sender, replies, welcome) = runtime
        .block_on(links.link(&[], 0))
        .map_err(|refused| refused.why)?;
    let shared = SharedEndpoint::new(None);
    shared.lock().sender = Some(sender);
    let (worker, session) = (Arc::clone(&shared), welcome.session.to_vec());
    samite_core::thread_builder()
        .and_then(|thread| {
            let thread = thread.name("remote device".to_owned());
            thread.spawn(move || runtime.block_on(links.run(worker, session, replies)))
        })
        .map_err(|error| error.to_string())?;
    Ok((Endpoint::new(&place, shared), welcome.devices))
}

fn links(
    address: Address,
    token: ClientToken,
    options: &RemoteOptions,
    runtime: tokio::runtime::Handle,
) -> Links {
    Links {
        carrier: Box::new(Connector {
            address,
            token,
            options: options.clone(),
        }),
        options: options.clone(),
        environment: Arc::new(System(runtime)),
    }
}

/// Makes connections to one server.
struct Connector {
    address: Address,
    token: ClientToken,
    options: RemoteOptions,
}

impl LinkConnector for Connector {
    fn place(&self) -> &str {
        &self.address.place
    }

    fn open(&self, requests: mpsc::UnboundedReceiver<proto::Request>) -> Opening<'_> {
        Box::pin(self.connect(requests))
    }
}

impl Connector {
    async fn connect(
        &self,
        requests: mpsc::UnboundedReceiver<proto::Request>,
    ) -> Result<Replies, Refused> {
        let place = self.address.place.as_str();
        let unreachable = |error: io::Error| Refused {
            kind: match error.kind() {
                ErrorKind::ConnectionRefused => RefusalKind::Nobody,
                _ => RefusalKind::Unclear,
            },
            why: format!("cannot be reached: {error}: is `samite remote-server` running there?"),
        };
        let stream = TcpStream::connect(place).await.map_err(unreachable)?;
        stream.set_nodelay(true).map_err(unreachable)?;
        let final_error = |why: String| Refused {
            why,
            kind: RefusalKind::Final,
        };
        let config =
            tls::client(self.address.pin).map_err(|error| final_error(error.to_string()))?;
        let name = tls::server_name().map_err(|error| final_error(error.to_string()))?;
        let stream = TlsConnector::from(config).connect(name, stream).await;
        let stream = stream.map_err(|error| Refused {
            kind: match error.kind() {
                // The server has another key, or does not use TLS.
                ErrorKind::InvalidData => RefusalKind::Final,
                _ => RefusalKind::Unclear,
            },
            why: match error.get_ref().and_then(|inner| inner.downcast_ref()) {
                Some(rustls::Error::General(why)) => why.clone(),
                Some(rustls::Error::InvalidMessage(_)) => {
                    "it does not speak TLS: is this the port of `samite remote-server`?".to_owned()
                }
                _ => broke(&error),
            },
        })?;
        let exported = tls::exported(stream.get_ref().1);
        let proof = self
            .token
            .proof(&exported.map_err(|error| final_error(error.to_string()))?);
        let (every, within) = self.options.keep_alive;
        let mut stream = Some(TokioIo::new(stream));
        let channel: Channel = tonic::transport::Endpoint::from_static("http://samite")
            .http2_keep_alive_interval(every)
            .keep_alive_timeout(within)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(8 << 20)
            .initial_connection_window_size(8 << 20)
            .connect_with_connector(tower::service_fn(move |_| {
                let stream = stream.take();
                std::future::ready(stream.ok_or_else(|| io::Error::from(ErrorKind::NotConnected)))
            }))
            .await
            .map_err(|error| Refused {
                why: broke(&error),
                kind: RefusalKind::Unclear,
            })?;
        let mut request = tonic::Request::new(UnboundedReceiverStream::new(requests));
        let proof = format!("samite {proof}").parse();
        request.metadata_mut().insert(
            "authorization",
            proof.map_err(|_| final_error("a proof is no header".to_owned()))?,
        );
        let mut client = RemoteClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
        let replies = client.session(request).await.map_err(refused)?;
        Ok(Box::pin(replies.into_inner()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::link::Link;
    use super::*;
    use crate::client::memory::command;
    use crate::{RemoteServer, RemoteServerOptions, identity};
    use samite_core::Error;
    use samite_reference::{ReferenceDevice, ReferenceOptions};
    use tokio_stream::StreamExt;
    use tonic::Code;

    /// Returns a server and a client with a valid token that breaks the rules of the protocol.
    fn rogue(change: impl FnOnce(&mut RemoteServerOptions)) -> (tempfile::TempDir, Connector) {
        let folder = tempfile::tempdir().unwrap();
        let [key, tokens] = ["key", "tokens"].map(|name| folder.path().join(name));
        let mut options = RemoteServerOptions::new(key, tokens.clone());
        change(&mut options);
        let device = ReferenceDevice::new(ReferenceOptions::default());
        let server = RemoteServer::bind(&[device as _], "127.0.0.1:0", options).unwrap();
        let address = Address::parse(&server.address().unwrap()).unwrap();
        std::thread::spawn(move || server.serve());
        let token = identity::read_tokens(&tokens).unwrap().remove(0);
        let connector = Connector {
            address,
            token,
            options: RemoteOptions::default(),
        };
        (folder, connector)
    }

    impl Connector {
        /// Returns connections on the runtime of the caller.
        fn links(&self) -> Links {
            let runtime = tokio::runtime::Handle::current();
            links(
                self.address.clone(),
                self.token.clone(),
                &self.options,
                runtime,
            )
        }
    }

    fn runtime() -> tokio::runtime::Runtime {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_all().build().unwrap()
    }

    #[test]
    fn an_oversized_message_ends_the_session() {
        let (_folder, connector) = rogue(|_| {});
        let Connector {
            address,
            token,
            options,
        } = connector;
        let (endpoint, _) = connect(address, token, &options).unwrap();
        let write = proto::command::Command::Write(proto::Write {
            data: vec![0; MAX_MESSAGE + 1].into(),
            ..proto::Write::default()
        });
        let error = endpoint.call("d", vec![command(write)]).unwrap_err();
        assert!(matches!(error, Error::DeviceLost { .. }), "{error}");
        assert!(error.to_string().contains("too large"), "{error}");
    }

    #[test]
    fn a_broken_connection_reports_its_cause() {
        let (_folder, mut connector) = rogue(|_| {});
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        connector.address.place = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                drop(client);
            }
        });
        let link = runtime().block_on(async { connector.links().link(&[], 0).await });
        let why = link.err().map(|refused| refused.why).unwrap();
        let cause = why.strip_prefix("the connection broke while it was made: ");
        assert!(cause.is_some_and(|cause| cause.len() > 10), "{why}");
    }

    #[test]
    fn invalid_request_numbers_close_the_connection() {
        let (_folder, connector) = rogue(|_| {});
        runtime().block_on(async {
            for number in [0, 2, u64::MAX] {
                let link = connector.links().link(&[], 0).await;
                let (sender, mut replies, _) = link.map_err(|refused| refused.why).unwrap();
                let request = proto::Request {
                    number,
                    confirm: true,
                    ..proto::Request::default()
                };
                sender.send(request).unwrap();
                let end = loop {
                    match replies.next().await {
                        Some(Ok(reply)) => assert_eq!(reply.number, 0),
                        other => break other.transpose(),
                    }
                };
                assert_eq!(end.unwrap_err().code(), Code::InvalidArgument);
            }
        });
    }

    #[test]
    fn sessions_belong_to_their_tokens() {
        let (folder, connector) = rogue(|options| {
            let text = format!("{}\n{}\n", "11".repeat(32), "22".repeat(32));
            identity::write_secret(&options.tokens, text.as_bytes()).unwrap();
        });
        let tokens = identity::read_tokens(&folder.path().join("tokens")).unwrap();
        runtime().block_on(async {
            let link = connector.links().link(&[], 0).await;
            let (_sender, _replies, welcome) = link.map_err(|refused| refused.why).unwrap();
            let other = Connector {
                token: tokens[1].clone(),
                address: connector.address.clone(),
                options: connector.options.clone(),
            };
            let why = |link: Result<Link, Refused>| link.map(drop).map_err(|r| r.why);
            let refused = why(other.links().link(&welcome.session, 0).await).unwrap_err();
            assert!(refused.contains("no such session"), "{refused}");
            // The session exists, and ends with this connection.
            assert_eq!(
                why(connector.links().link(&welcome.session, 0).await),
                Ok(())
            );
            let refused = why(connector.links().link(&[1; 3], 0).await).unwrap_err();
            assert!(refused.contains("no such session"), "{refused}");
            assert_eq!(why(other.links().link(&[], 0).await), Ok(()));
        });
    }
}
