//! Transfer of KV caches between servers, so that one computes prompts and another one generates.
//!
//! A router sends a request to a prefill server with vLLM's `kv_transfer_params` and
//! `do_remote_decode`. That server computes the prompt, offers its cache, and describes the offer
//! in its response. The router sends the request with that description to a decode server, which
//! fetches the cache before it begins. If this fails, the decode server computes the prompt.
//!
//! The servers share a secret. It signs descriptions, so that clients cannot make a server connect
//! to addresses of their choice, and encrypts what is sent.

mod link;

pub use link::TransferSecret;

use crate::account::RequestAccount;
use crate::api::slots::on_engine;
use crate::app::lock;
use crate::context::RequestContext;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::job::Job;
use link::TransferId;
use samite_llm::{SavedSequence, ScaledAdapter};
use samite_requests::Request;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Options of transfers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvTransferOptions {
    /// Address to listen on for servers that fetch caches, such as `0.0.0.0:5600`. `None` for a
    /// server that only fetches.
    pub listen: Option<String>,
    /// Host under which other servers reach this one. `None` for the address on which a request
    /// arrives.
    pub host: Option<String>,
    /// Secret of the fleet.
    pub secret: TransferSecret,
}

/// Time for which a cache is offered.
const OFFER_TIME: Duration = Duration::from_secs(60);

/// Maximum time to connect to a server.
const CONNECT_TIME: Duration = Duration::from_secs(3);

/// Maximum time of a whole transfer.
const MAX_TRANSFER_TIME: Duration = Duration::from_secs(600);

/// Maximum number of peers that have not shown yet that they know the secret. Further ones are
/// closed.
const MAX_STRANGERS: usize = 256;

/// Maximum number of caches that are sent at the same time. Further peers wait.
const MAX_FETCHES: usize = 64;

/// Delay after a connection could not be accepted.
const PAUSE: Duration = Duration::from_millis(50);

/// Memory of an offer, which its owner's account pays for. Dropping it releases the memory.
struct Reserved {
    transfers: Arc<KvTransfers>,
    bytes: usize,
    account: RequestAccount,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        *lock(&self.transfers.reserved) -= self.bytes;
    }
}

/// A cache that waits to be fetched.
struct Offer {
    bytes: Vec<u8>,
    #[expect(dead_code, reason = "held for its drop")]
    reserved: Reserved,
}

/// Caches that this server offers, and its means to fetch others.
pub(crate) struct KvTransfers {
    options: KvTransferOptions,
    /// Maximum bytes of all offers together.
    limit: usize,
    /// Bytes of all offers, and of those that are being made.
    reserved: Mutex<usize>,
    /// Port on which other servers fetch, once the server listens.
    port: Mutex<Option<u16>>,
    offers: Mutex<BTreeMap<TransferId, Offer>>,
}

impl std::fmt::Debug for KvTransfers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KvTransfers")
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

/// Part of a request in a transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TransferRole {
    /// The request computes a prompt for another server.
    Offers,
    /// The request continues a prompt that another server has computed.
    Fetches {
        host: String,
        port: u16,
        id: TransferId,
        signature: blake3::Hash,
    },
}

impl TransferRole {
    /// Reads `kv_transfer_params`. Those of transfers that other programs offer are ignored.
    pub fn read(fields: &Fields<'_>) -> Result<Option<Self>> {
        let Some(params) = fields.fields("kv_transfer_params")? else {
            return Ok(None);
        };
        if params.boolean(&["do_remote_decode"], false)? {
            return Ok(Some(TransferRole::Offers));
        }
        if !params.boolean(&["do_remote_prefill"], false)? {
            return Ok(None);
        }
        let host = params.text(&["remote_host"])?;
        let port = params.integer(&["remote_port"], 1, u16::MAX.into())?;
        let id = params.text(&["remote_request_id"])?.and_then(parse_id);
        let signature = params.text(&["samite_signature"])?;
        let signature = signature.and_then(|text| blake3::Hash::from_hex(text).ok());
        let port = port.and_then(|port| u16::try_from(port).ok());
        let (Some(host), Some(port), Some(id), Some(signature)) = (host, port, id, signature)
        else {
            return Ok(None);
        };
        Ok(Some(TransferRole::Fetches {
            host: host.to_owned(),
            port,
            id,
            signature,
        }))
    }
}

fn parse_id(text: &str) -> Option<TransferId> {
    let number = u128::from_str_radix(text, 16).ok();
    number
        .filter(|_| text.len() == 2 * size_of::<TransferId>())
        .map(u128::to_be_bytes)
}

fn id_text(id: TransferId) -> String {
    format!("{:032x}", u128::from_be_bytes(id))
}

impl KvTransfers {
    /// Creates the transfers of a server whose requests may hold `request_memory` bytes.
    pub fn new(options: KvTransferOptions, request_memory: usize) -> Arc<Self> {
        Arc::new(KvTransfers {
            options,
            // The rest is for the requests themselves.
            limit: request_memory / 4,
            reserved: Mutex::default(),
            port: Mutex::default(),
            offers: Mutex::default(),
        })
    }

    /// Listens for servers that fetch caches, if this is enabled.
    ///
    /// # Errors
    /// Returns an error if the address cannot be bound.
    pub async fn listen(self: &Arc<Self>) -> io::Result<()> {
        let Some(address) = &self.options.listen else {
            return Ok(());
        };
        let failed = |error: io::Error| {
            let text =
                format!("--kv-transfer {address}: {error}; an address looks like 0.0.0.0:5600");
            io::Error::new(error.kind(), text)
        };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        *lock(&self.port) = Some(address.port());
        tracing::info!(%address, "KV caches are offered");
        tokio::spawn(accept(listener, Arc::clone(self)));
        Ok(())
    }

    /// Reserves memory for an offer.
    fn reserve(self: &Arc<Self>, bytes: usize, account: RequestAccount) -> Result<Reserved> {
        let mut reserved = lock(&self.reserved);
        if bytes > self.limit.saturating_sub(*reserved) {
            let message = "offers would exceed a quarter of --request-memory: raise it";
            return Err(ApiError::new(503, message));
        }
        account.charge("kv_transfer_params", bytes)?;
        *reserved += bytes;
        Ok(Reserved {
            transfers: Arc::clone(self),
            bytes,
            account,
        })
    }

    fn sign(&self, host: &str, port: u16, id: &TransferId) -> blake3::Hash {
        let parts = [b"offer", host.as_bytes(), &port.to_be_bytes(), id];
        self.options.secret.hash(&parts)
    }

    /// Keeps an offer until it is fetched, or for [`OFFER_TIME`].
    fn insert(self: &Arc<Self>, offer: Offer) -> io::Result<TransferId> {
        let id = link::random()?;
        lock(&self.offers).insert(id, offer);
        let transfers = Arc::downgrade(self);
        tokio::spawn(async move {
            tokio::time::sleep(OFFER_TIME).await;
            if let Some(transfers) = transfers.upgrade() {
                lock(&transfers.offers).remove(&id);
            }
        });
        Ok(id)
    }

    /// Offers a cache, and returns its description for the response.
    fn offer(
        self: &Arc<Self>,
        context: &RequestContext,
        bytes: Vec<u8>,
        reserved: Reserved,
        port: u16,
    ) -> io::Result<Value> {
        // Not the request's `Host`, which a client could choose for another server to connect to.
        let local = context.local_address;
        let local = local.map(|address| address.to_canonical().to_string());
        let Some(host) = self.options.host.clone().or(local) else {
            return Err(io::Error::other("this server does not know its address"));
        };
        let id = self.insert(Offer { bytes, reserved })?;
        Ok(json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "remote_engine_id": context.instance_id,
            "remote_request_id": id_text(id),
            "remote_host": host,
            "remote_port": port,
            "tp_size": 1,
            "samite_signature": self.sign(&host, port, &id).to_hex().as_str(),
        }))
    }
}

/// A prompt whose cache is offered when its job ends.
pub(crate) struct OfferedPrompt {
    tokens: Vec<u32>,
    adapters: Option<Vec<ScaledAdapter>>,
    salt: u64,
}

impl OfferedPrompt {
    /// Returns the prompt of a job, if its cache is to be offered.
    pub fn from_job(job: &Job) -> Option<Self> {
        match (&job.transfer, &job.requests[..]) {
            (Some(TransferRole::Offers), [request]) => Some(OfferedPrompt {
                tokens: request.prompt.clone(),
                adapters: request.adapters.clone(),
                salt: request.cache.salt,
            }),
            _ => None,
        }
    }
}

/// Offers the cache of a computed prompt. Returns `kv_transfer_params` for the response, or `None`
/// if there is nothing to offer.
pub(crate) async fn offer(context: &RequestContext, prompt: OfferedPrompt) -> Option<Value> {
    let transfers = context.transfers.as_ref();
    let listening = transfers.and_then(|transfers| Some((transfers, (*lock(&transfers.port))?)));
    let Some((transfers, port)) = listening else {
        tracing::warn!("a request asks for a cache: start the server with --kv-transfer");
        return None;
    };
    let offer = async {
        let length = prompt.tokens.len();
        let account = context.account.another();
        let reserving = Arc::clone(transfers);
        let saved = on_engine(context, move |engine| {
            let mut reserved = None;
            let may_save = |bytes| {
                let result = reserving.reserve(bytes, account);
                let is_reserved = result.is_ok();
                reserved = Some(result);
                is_reserved
            };
            let (tokens, adapters) = (&prompt.tokens, prompt.adapters.as_deref());
            let saved = engine.save_prefix(tokens, adapters, prompt.salt, may_save);
            (saved, reserved)
        });
        let (saved, reserved) = saved.await?;
        let saved = saved.map_err(|error| ApiError::new(500, error.to_string()))?;
        let reserved = reserved.transpose()?;
        let (Some(saved), Some(reserved)) = (saved, reserved) else {
            tracing::warn!(
                "the cache of a prompt was evicted before it could be offered: raise --cached-prefixes"
            );
            return Ok(None);
        };
        // The last token of a prompt is always computed.
        if saved.len() + 1 < length {
            tracing::warn!(
                "{} of {length} tokens of a prompt are offered, the others were evicted before: raise --cached-prefixes",
                saved.len()
            );
        }
        // The sequence, until its bytes are written.
        let hold = reserved.account.hold("kv_transfer_params", saved.bytes())?;
        let bytes = tokio::task::spawn_blocking(move || {
            let bytes = saved.to_bytes();
            drop(hold);
            bytes
        });
        let bytes = bytes.await;
        let bytes = bytes.map_err(|error| ApiError::new(500, error.to_string()))?;
        let bytes = bytes.map_err(|error| ApiError::new(500, error.to_string()))?;
        let offer = transfers.offer(context, bytes, reserved, port);
        offer
            .map(Some)
            .map_err(|error| ApiError::new(500, error.to_string()))
    };
    match offer.await {
        Ok(params) => params,
        Err(error) => {
            tracing::warn!("the cache of a prompt cannot be offered: {}", error.message);
            None
        }
    }
}

/// Fetches the cache of a job's prompt into the prefix cache. If this fails, the job computes the
/// prompt.
pub(crate) async fn fetch(context: &RequestContext, job: &Job, role: &TransferRole) {
    let TransferRole::Fetches {
        host,
        port,
        id,
        signature,
    } = role
    else {
        return;
    };
    let Some(transfers) = &context.transfers else {
        tracing::warn!("a request names a cache: start the server with --kv-transfer-key");
        return;
    };
    if transfers.sign(host, *port, id) != *signature {
        tracing::warn!(
            "a request names a cache at {}:{port} that no server with this secret offers",
            host.escape_debug()
        );
        return;
    }
    let [request] = &job.requests[..] else {
        return;
    };
    // A request of a slot finds only texts that were left in it.
    if !request.cache.reuse || request.slot.is_some() {
        return;
    }
    let start = Instant::now();
    let fetched = fetched(transfers, context, request, (host, *port), id);
    let fetched = timeout(MAX_TRANSFER_TIME, fetched).await;
    match fetched.unwrap_or_else(|_| Err("it takes too long".to_owned())) {
        Ok((tokens, bytes)) => {
            let time = start.elapsed().as_secs_f64() * 1e3;
            tracing::info!("{tokens} tokens ({bytes} bytes) fetched from {host} in {time:.1} ms");
        }
        Err(error) => {
            tracing::warn!("a cache at {host}:{port} cannot be fetched: {error}");
        }
    }
}

async fn fetched(
    transfers: &KvTransfers,
    context: &RequestContext,
    request: &Request,
    place: (&str, u16),
    id: &TransferId,
) -> Result<(usize, usize), String> {
    let text = |error: io::Error| error.to_string();
    let stream = timeout(CONNECT_TIME, TcpStream::connect(place)).await;
    let stream = stream.map_err(|_| "the server does not answer".to_owned())?;
    let stream = stream.map_err(text)?;
    let mut hold = None;
    let reserve = |length: usize| {
        let charge = context.account.hold("kv_transfer_params", length);
        hold = Some(charge.map_err(|error| io::Error::other(error.message))?);
        Ok(())
    };
    let bytes = link::fetch(stream, &transfers.options.secret, id, reserve).await;
    let bytes = bytes.map_err(text)?;
    let length = bytes.len();
    let read = tokio::task::spawn_blocking(move || SavedSequence::from_bytes(bytes)).await;
    let saved = read.map_err(|error| error.to_string())?;
    let saved = saved.map_err(|error| error.to_string())?;
    let (adapters, salt) = (request.adapters.clone(), request.cache.salt);
    let restored = on_engine(context, move |engine| {
        engine.restore_prefix(adapters.as_deref(), salt, &saved)
    });
    let restored = restored.await.map_err(|error| error.message)?;
    let tokens = restored.map_err(|error| error.to_string())?;
    Ok((tokens, length))
}

/// Answers servers that fetch caches.
async fn accept(listener: TcpListener, transfers: Arc<KvTransfers>) {
    let strangers = Arc::new(Semaphore::new(MAX_STRANGERS));
    let fetches = Arc::new(Semaphore::new(MAX_FETCHES));
    loop {
        let Ok((stream, peer)) = listener.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let Ok(stranger) = Arc::clone(&strangers).try_acquire_owned() else {
            tracing::debug!(%peer, "too many connections for KV transfers");
            continue;
        };
        let (transfers, fetches) = (Arc::clone(&transfers), Arc::clone(&fetches));
        tokio::spawn(async move {
            let result = timeout(MAX_TRANSFER_TIME, async {
                stream.set_nodelay(true)?;
                let greeted = link::greet(stream, &transfers.options.secret).await?;
                drop(stranger);
                let _fetch = fetches.acquire().await.map_err(io::Error::other)?;
                answer(greeted, peer, &transfers).await
            });
            if let Err(error) = result.await.unwrap_or_else(|late| Err(late.into())) {
                // Anyone can connect, so this is no warning.
                tracing::debug!(%peer, %error, "sending a KV cache failed");
            }
        });
    }
}

async fn answer(
    greeted: link::Greeted<TcpStream>,
    peer: SocketAddr,
    transfers: &KvTransfers,
) -> io::Result<()> {
    let start = Instant::now();
    let mut length = 0;
    let find = |id: &TransferId| {
        let offer = lock(&transfers.offers).remove(id)?;
        length = offer.bytes.len();
        Some(offer)
    };
    greeted.answer(&transfers.options.secret, find).await?;
    let time = start.elapsed().as_secs_f64() * 1e3;
    tracing::info!(%peer, "{length} bytes of a cache sent in {time:.1} ms");
    Ok(())
}

impl AsRef<[u8]> for Offer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::account::Accounts;

    #[test]
    fn an_offer_and_its_memory_end_after_a_while() {
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let options = KvTransferOptions {
                listen: None,
                host: None,
                secret: TransferSecret::new(&[1; 32]).unwrap(),
            };
            let accounts = Arc::new(Accounts::new(1 << 20));
            let transfers = KvTransfers::new(options, 1 << 20);
            let account = RequestAccount::new(&accounts, 0);
            let bytes = vec![0; 1000];
            let reserved = transfers.reserve(bytes.len(), account).unwrap();
            let id = transfers.insert(Offer { bytes, reserved }).unwrap();
            tokio::time::sleep(OFFER_TIME / 2).await;
            assert!(lock(&transfers.offers).contains_key(&id));
            tokio::time::sleep(OFFER_TIME).await;
            assert!(lock(&transfers.offers).is_empty());
            assert_eq!(*lock(&transfers.reserved), 0);
        });
    }
}
