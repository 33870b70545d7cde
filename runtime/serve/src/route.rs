//! Routes each request to its API.

use crate::access::{self, Caller};
use crate::account::RequestAccount;
use crate::api::{
    anthropic, embeddings, fleet, metrics, models, native, ollama, openai_chat, openai_completions,
    props, responses, slots, tokens,
};
use crate::app::App;
use crate::body::LARGE;
use crate::chat;
use crate::connections::Connection;
use crate::context::RequestContext;
use crate::entry::Entry;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::hub::Hub;
use crate::job::Job;
use crate::openapi;
use crate::page;
use crate::paths::{Delete, Get, Methods, Post};
use crate::stream::{self, answer, json_response};
use crate::stream_sessions::ResumableConversation;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use hyper::body::Incoming;
use serde_json::{Value, json};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Error format of an API.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Dialect {
    OpenAi,
    Responses,
    Anthropic,
    Ollama,
}

impl Dialect {
    fn from_path(path: &str) -> Self {
        match path {
            _ if path.starts_with("/v1/messages") => Dialect::Anthropic,
            _ if path.starts_with("/api/") => Dialect::Ollama,
            _ if path.trim_start_matches("/v1").starts_with("/responses") => Dialect::Responses,
            _ => Dialect::OpenAi,
        }
    }

    fn response(self, error: &ApiError) -> Response {
        let object = match self {
            Dialect::OpenAi => error.object(),
            Dialect::Responses => error.responses(),
            Dialect::Anthropic => error.anthropic(),
            Dialect::Ollama => error.ollama(),
        };
        let mut response = json_response(error.status, &object);
        let allow = error.more.get("allow").and_then(Value::as_str);
        if let Some(allow) = allow.and_then(|allow| HeaderValue::from_str(allow).ok()) {
            response.headers_mut().insert(header::ALLOW, allow);
        }
        if error.status == 503 {
            let retry = HeaderValue::from_static("1");
            response.headers_mut().insert(header::RETRY_AFTER, retry);
        }
        response
    }
}

/// Answers a request, and logs it once its response starts.
pub async fn handle(
    hub: Arc<Hub>,
    peer: &Connection,
    request: hyper::Request<Incoming>,
) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let start = Instant::now();
    let response = respond(hub, peer, request).await;
    let milliseconds = start.elapsed().as_secs_f64() * 1e3;
    let status = response.status().as_u16();
    tracing::info!("{method} {path}: {status} after {milliseconds:.1} ms");
    response
}

async fn respond(hub: Arc<Hub>, peer: &Connection, request: hyper::Request<Incoming>) -> Response {
    let (parts, body) = request.into_parts();
    let options = &hub.options;
    let whole = parts.uri.path();
    let path = whole.strip_prefix(options.prefix.as_str());
    let path = path.filter(|rest| rest.starts_with('/') || options.prefix.is_empty());
    if path.is_none() && whole == options.prefix {
        // The page names its files relative to this path.
        let to = HeaderValue::from_str(&format!("{whole}/"));
        let mut response = StatusCode::PERMANENT_REDIRECT.into_response();
        if let Ok(to) = to {
            response.headers_mut().insert(header::LOCATION, to);
        }
        return response;
    }
    let methods = path.and_then(|path| Methods::for_path(options, path));
    let path = path.unwrap_or(whole).to_owned();
    let dialect = Dialect::from_path(&path);
    if parts.method == Method::OPTIONS {
        let mut response = StatusCode::OK.into_response();
        access::add_cors(options, &parts.headers, response.headers_mut(), true);
        return response;
    }
    let refused = |message: &str| dialect.response(&ApiError::new(403, message));
    if !access::is_own_host(options, &parts.headers) {
        return refused(
            "without keys, this server answers under private names and addresses only: name others with --allowed-hosts, or set --api-key",
        );
    }
    let changes = ![Method::GET, Method::HEAD].contains(&parts.method);
    if changes && access::is_foreign(options, &parts.headers) {
        return refused("a page of another origin asks: name it with --cors-origins, or set keys");
    }
    let is_public = methods.is_some_and(|methods| {
        matches!(methods.get, Some(Get::Health | Get::Ready | Get::File)) && methods.post.is_none()
    });
    let stranger = Caller {
        owner: 0,
        is_admin: false,
    };
    let caller = access::caller(options, &parts.headers).or(is_public.then_some(stranger));
    let owner = caller.map_or(0, |caller| caller.owner);
    let account = Arc::new(RequestAccount::new(&hub.accounts, owner));
    let result = match caller {
        None => Err(ApiError::new(
            401,
            "Invalid API Key: send one that this server knows, as \"Authorization: Bearer KEY\" \
             or \"X-Api-Key: KEY\"",
        )),
        Some(caller) => match methods {
            None => Err(ApiError::new(
                404,
                format!("File Not Found: there is no {} {path}", parts.method),
            )),
            Some(methods) => {
                let query = parts.uri.query().unwrap_or_default();
                let asked = CheckedRequest {
                    hub: Arc::clone(&hub),
                    path: path.clone(),
                    query: query.to_owned(),
                    caller,
                    account: Arc::clone(&account),
                    headers: parts.headers.clone(),
                    local_address: peer.local_address,
                };
                let is_get = [Method::GET, Method::HEAD].contains(&parts.method);
                match (methods.get, methods.post, methods.delete) {
                    (Some(get), ..) if is_get => match asked.reload(get).await {
                        Ok(()) => asked.get(get),
                        Err(error) => Err(error),
                    },
                    (.., Some(Delete::Stream)) if parts.method == Method::DELETE => {
                        asked.stop_stream()
                    }
                    (.., Some(Delete::Model)) if parts.method == Method::DELETE => {
                        let name = query_value(query, "model").unwrap_or_default();
                        asked.delete_model(&name).await
                    }
                    (.., Some(Delete::OllamaModel)) if parts.method == Method::DELETE => {
                        match read_body(&hub, &parts.headers, body, &asked, peer).await {
                            Ok(body) => asked.delete_ollama_model(&body).await,
                            Err(error) => Err(error),
                        }
                    }
                    (_, Some(post), _) if parts.method == Method::POST => {
                        match read_body(&hub, &parts.headers, body, &asked, peer).await {
                            Ok(body) => asked.run(post, body).await,
                            Err(error) => Err(error),
                        }
                    }
                    _ => Err(ApiError::method(
                        parts.method.as_str(),
                        &path,
                        &methods.names(),
                    )),
                }
            }
        },
    };
    let mut response = result.unwrap_or_else(|error| dialect.response(&error));
    // The request's memory stays charged until the response is written.
    response.extensions_mut().insert(account);
    access::add_cors(options, &parts.headers, response.headers_mut(), false);
    let name = HeaderName::from_static("x-request-id");
    if let Some(id) = parts.headers.get(&name) {
        response.headers_mut().insert(name, id.clone());
    }
    response
}

/// Reads a body of JSON.
async fn read_body(
    hub: &Hub,
    headers: &HeaderMap,
    body: Incoming,
    asked: &CheckedRequest,
    peer: &Connection,
) -> Result<Value> {
    let length = headers.get(header::CONTENT_LENGTH);
    let length = length.and_then(|length| length.to_str().ok()?.parse().ok());
    let body = Body::new(body);
    hub.bodies.json(body, length, &asked.account, peer).await
}

/// Runs `act` on a thread for blocking work, so that other requests continue. Large requests take
/// turns.
async fn blocking<T: Send + 'static>(
    context: &Arc<RequestContext>,
    act: impl FnOnce(&RequestContext) -> Result<T> + Send + 'static,
) -> Result<T> {
    let turn = if context.account.held() > LARGE {
        Some(context.large.begin(context.caller.owner).await?)
    } else {
        None
    };
    let guard = context.cancelled_when_dropped();
    let own = Arc::clone(context);
    let result = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        act(&own)
    });
    let result = result.await;
    guard.disarm();
    result
        .map_err(|error| ApiError::new(500, format!("the request could not be handled: {error}")))?
}

/// Computes a JSON response from the body alone.
async fn simple(
    context: &Arc<RequestContext>,
    body: Value,
    act: impl FnOnce(&RequestContext, &Value) -> Result<Value> + Send + 'static,
) -> Result<Response> {
    let value = blocking(context, move |context| act(context, &body)).await?;
    Ok(json_response(200, &value))
}

/// Works like [`simple`], but in turns, because there is one context for embeddings.
async fn embedding(
    context: &Arc<RequestContext>,
    body: Value,
    act: impl FnOnce(&RequestContext, &Value) -> Result<Value> + Send + 'static,
) -> Result<Response> {
    // The turn ends with the work, even if the client disconnects before.
    let turn = context.embedding.begin(context.caller.owner).await?;
    let _leaves = context.cancelled_when_dropped();
    let value = blocking(context, move |context| {
        let _turn = turn;
        act(context, &body)
    })
    .await?;
    Ok(json_response(200, &value))
}

async fn chat_completion(context: &Arc<RequestContext>, body: Value) -> Result<Response> {
    let job = blocking(context, move |context| chat::job(context, &body)).await?;
    let encoder = openai_chat::ChatEncoder::new(&job);
    if let Some(stop) = &job.reasoning_stop {
        let owner = context.caller.owner;
        context.reasoning_controls.add(owner, &encoder.id, stop);
    }
    answer(Arc::clone(context), job, encoder).await
}

async fn native_completion(
    context: &Arc<RequestContext>,
    body: Value,
    read: fn(&RequestContext, &Value) -> Result<(Job, bool)>,
) -> Result<Response> {
    let (job, is_list) = blocking(context, move |context| {
        chat::no_echo(&Fields::new(&body)?)?;
        read(context, &body)
    })
    .await?;
    let kept = Job {
        requests: Vec::new(),
        ..job.clone()
    };
    answer(
        Arc::clone(context),
        job,
        native::NativeEncoder { job: kept, is_list },
    )
    .await
}

/// Returns a parameter of a query.
fn query_value(query: &str, name: &str) -> Option<String> {
    query.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=')?;
        (key == name).then(|| unescaped(value))
    })
}

/// Decodes `%` escapes.
fn unescaped(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [byte, after @ ..] = rest {
        let code = after.get(..2).filter(|_| *byte == b'%');
        let code = code.and_then(|code| std::str::from_utf8(code).ok());
        match code.and_then(|code| u8::from_str_radix(code, 16).ok()) {
            Some(code) => {
                bytes.push(code);
                rest = &after[2..];
            }
            None => {
                bytes.push(*byte);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns an error if the server does not accept new requests.
fn ready(hub: &Hub) -> Result<Response> {
    if hub.is_draining.load(Ordering::SeqCst) {
        Err(ApiError::ending())
    } else {
        Ok(json_response(200, &json!({"status": "ok"})))
    }
}

fn told_metrics(app: &App) -> Result<Response> {
    if !app.options.metrics {
        return Err(ApiError::not_supported(
            "this server tells no metrics: start it with --metrics",
        ));
    }
    let mut response = Body::from(metrics::text(app)).into_response();
    let headers = response.headers_mut();
    let kind = HeaderValue::from_static("text/plain; version=0.0.4");
    headers.insert(header::CONTENT_TYPE, kind);
    headers.insert("process-start-time-unix", HeaderValue::from(app.started));
    Ok(response)
}

async fn predict(context: &Arc<RequestContext>, mut body: Value) -> Result<Response> {
    let instances = match body.get_mut("instances").map(Value::take) {
        Some(Value::Array(list)) => Some(list),
        _ => None,
    };
    let instances = instances.ok_or_else(|| ApiError::field("instances", "must be a list"))?;
    let mut running = Vec::new();
    for instance in instances {
        let job = blocking(context, move |context| chat::job(context, &instance)).await?;
        let mut encoder = openai_chat::ChatEncoder::new(&job);
        let mut job = job;
        let submitted = blocking(context, move |context| {
            stream::Running::submit(context, &mut job)
        })
        .await?;
        running.push(async move {
            let choices = submitted.all().await?;
            Ok::<_, ApiError>(stream::ResponseEncoder::whole(&mut encoder, &choices))
        });
    }
    let mut predictions = Vec::new();
    for one in running {
        predictions.push(one.await?);
    }
    Ok(json_response(200, &json!({"predictions": predictions})))
}

/// A request that passed the access checks.
struct CheckedRequest {
    hub: Arc<Hub>,
    path: String,
    query: String,
    caller: Caller,
    account: Arc<RequestAccount>,
    headers: HeaderMap,
    local_address: Option<IpAddr>,
}

/// Maximum number of bytes in the identifier of a conversation.
const MAX_CONVERSATION_ID: usize = 1024;

/// Returns the conversation that a request names, for an answer that can be resumed.
fn conversation_id(headers: &HeaderMap) -> Result<Option<String>> {
    const NAME: &str = "x-conversation-id";
    let Some(id) = headers.get(NAME).filter(|id| !id.is_empty()) else {
        return Ok(None);
    };
    let id = id
        .to_str()
        .ok()
        .filter(|id| id.len() <= MAX_CONVERSATION_ID);
    let wrong = || format!("must have at most {MAX_CONVERSATION_ID} characters, all of ASCII");
    let id = id.ok_or_else(|| ApiError::field(NAME, wrong()))?;
    Ok(Some(id.to_owned()))
}

impl CheckedRequest {
    /// Rejects a key that may not do `what`.
    fn check_admin(&self, what: &str) -> Result<()> {
        if self.caller.is_admin {
            return Ok(());
        }
        Err(ApiError::new(
            403,
            format!("{what} needs an administrator's key: the server names them with --admin-key"),
        ))
    }

    fn context(&self, app: Arc<App>) -> Result<Arc<RequestContext>> {
        let large = Arc::clone(&self.hub.large);
        let account = Arc::clone(&self.account);
        let mut context = RequestContext::new(app, self.caller, account, large);
        context.conversation = conversation_id(&self.headers)?.map(|id| ResumableConversation {
            sessions: Arc::clone(&self.hub.stream_sessions),
            id,
        });
        context.transfers.clone_from(&self.hub.transfers);
        context.local_address = self.local_address;
        Ok(Arc::new(context))
    }

    /// Returns the conversation in the query.
    fn asked_conversation(&self) -> Result<String> {
        let id = query_value(&self.query, "conv_id").filter(|id| !id.is_empty());
        id.ok_or_else(|| ApiError::field("conv_id", "is missing"))
    }

    /// Replays an answer from an offset, and follows it to its end.
    fn resume_stream(&self) -> Result<Response> {
        let id = self.asked_conversation()?;
        let offset = query_value(&self.query, "from").unwrap_or_else(|| "0".to_owned());
        let offset = offset
            .parse()
            .map_err(|_| ApiError::field("from", "must be a number of bytes"))?;
        let sessions = &self.hub.stream_sessions;
        if sessions.is_parked(self.caller.owner, &id) {
            return Err(ApiError::new(503, "the model is being loaded: try again"));
        }
        let session = sessions.find(self.caller.owner, &id);
        let missing = || ApiError::new(404, "there is no such stream (any more)");
        let session = session.ok_or_else(missing)?;
        if !session.has(offset) {
            let message = "these bytes are no longer stored: start from a larger offset";
            return Err(ApiError::field("from", message));
        }
        Ok(stream::resumed(session, offset))
    }

    fn stop_stream(&self) -> Result<Response> {
        let id = self.asked_conversation()?;
        self.hub.stream_sessions.cancel(self.caller.owner, &id);
        Ok(StatusCode::NO_CONTENT.into_response())
    }

    async fn delete_model(&self, name: &str) -> Result<Response> {
        self.check_admin("deleting a model")?;
        if name.is_empty() {
            return Err(ApiError::field("model", "is missing in the query"));
        }
        self.hub.delete(name).await?;
        Ok(json_response(200, &json!({"success": true})))
    }

    async fn delete_ollama_model(&self, body: &Value) -> Result<Response> {
        let name = Fields::new(body)?.text(&["model", "name"])?;
        self.delete_model(name.unwrap_or_default()).await?;
        Ok(StatusCode::OK.into_response())
    }

    fn look_up_streams(&self, body: &Value) -> Result<Response> {
        /// Maximum number of conversations.
        const MAX_IDS: usize = 1024;
        let ids = Fields::new(body)?.texts("conversation_ids", MAX_IDS)?;
        let found = self.hub.stream_sessions.lookup(self.caller.owner, &ids);
        Ok(json_response(200, &found))
    }

    /// Changes a running answer.
    fn control_chat(&self, body: &Value) -> Result<Response> {
        let fields = Fields::new(body)?;
        let id = fields.required_text("id")?;
        match fields.required_text("action")? {
            "reasoning_end" => {}
            _ => return Err(ApiError::field("action", "must be \"reasoning_end\"")),
        }
        let owner = self.caller.owner;
        let mut apps = self.hub.loaded();
        let answer = if apps.any(|app| app.reasoning_controls.stop(owner, id)) {
            json!({"success": true})
        } else {
            let message = "no running answer with \"reasoning_control\" has this id";
            json!({"success": false, "message": message})
        };
        Ok(json_response(200, &answer))
    }

    /// Returns the model that the query names, if it is loaded.
    fn look(&self) -> Result<Arc<App>> {
        self.hub.look(query_value(&self.query, "model").as_deref())
    }

    /// Lists the library's models anew if the query asks for that.
    async fn reload(&self, get: Get) -> Result<()> {
        let is_asked = || {
            let reload = query_value(&self.query, "reload");
            matches!(reload.as_deref(), Some("1" | "true"))
        };
        let is_foreign = access::is_foreign(&self.hub.options, &self.headers);
        if get != Get::Models || is_foreign || !self.caller.is_admin || !is_asked() {
            return Ok(());
        }
        let hub = Arc::clone(&self.hub);
        let refreshed = tokio::task::spawn_blocking(move || hub.refresh()).await;
        let refreshed = refreshed.unwrap_or_else(|error| Err(error.to_string()));
        refreshed.map_err(|error| ApiError::new(500, error))?;
        self.hub.events.send("*", "models_reload", None);
        Ok(())
    }

    fn get(&self, get: Get) -> Result<Response> {
        let hub = &self.hub;
        let value = match get {
            Get::Health => json!({"status": "ok"}),
            Get::Ready => return ready(hub),
            Get::OpenApi => return openapi::response(hub),
            Get::Metrics => {
                self.check_admin("reading metrics")?;
                return told_metrics(&*self.look()?);
            }
            Get::File => {
                let none = || ApiError::new(404, "there is no such file");
                return page::file(&self.path).ok_or_else(none);
            }
            Get::ModelEvents => {
                self.check_admin("following the models")?;
                let events = hub.events.subscribe().ok_or_else(ApiError::ending)?;
                return Ok(stream::model_events(events, hub.options.ping_seconds));
            }
            Get::Models => {
                let prefix = ["/v1/models/", "/models/"];
                match prefix
                    .iter()
                    .find_map(|prefix| self.path.strip_prefix(prefix))
                {
                    None => models::list(hub),
                    Some(id) => models::one(hub, &unescaped(id))?,
                }
            }
            Get::Props if hub.is_router() && query_value(&self.query, "model").is_none() => {
                props::router(hub)
            }
            Get::Props => props::props(&*self.look()?)?,
            Get::Plan => self.look()?.options.plan.clone(),
            Get::Slots => {
                if hub.options.slots {
                    slots::list(&*self.look()?, self.caller)?
                } else {
                    return Err(ApiError::not_supported(
                        "this server does not tell about slots: start it without --no-slots",
                    ));
                }
            }
            Get::Adapters => props::adapters(&*self.look()?),
            Get::Stream => return self.resume_stream(),
            Get::TokenizerInfo => tokens::info(&*self.look()?),
            Get::ModelInfo => fleet::model_info(&*self.look()?),
            Get::ServerInfo => fleet::server_info(&*self.look()?),
            Get::KvEventSources => fleet::kv_event_sources(&*self.look()?),
            Get::Version => json!({"version": env!("CARGO_PKG_VERSION")}),
            Get::Load => fleet::load(&*self.look()?),
            Get::OllamaVersion => ollama::version(),
            Get::OllamaTags => ollama::tags(hub),
            Get::OllamaPs => ollama::ps(hub),
        };
        Ok(json_response(200, &value))
    }

    /// Returns the model that the body or the query names. A server of one model
    /// answers to any name, except to Ollama's clients, which pull a model that does not exist.
    fn named(&self, body: &Value, of_ollama: bool) -> Result<Arc<Entry>> {
        let name = match body.get("model").or_else(|| body.get("name")) {
            None | Some(Value::Null) => query_value(&self.query, "model"),
            Some(Value::String(name)) => Some(name.clone()),
            Some(other) => {
                return Err(ApiError::field(
                    "model",
                    format!("must be a string, and is {}", crate::fields::kind(other)),
                ));
            }
        };
        match name.as_deref() {
            Some(name) if of_ollama && !name.is_empty() => {
                let is_adapter = |app: Arc<App>| app.adapter_named(name).is_some();
                if self.hub.loaded().any(is_adapter) {
                    return self.hub.find(Some(name));
                }
                self.hub.find_named(name)
            }
            name => self.hub.find(name),
        }
    }

    /// Answers a POST request. A stream that can be resumed is answered even if its client
    /// disconnects while the model is loaded.
    async fn run(self, post: Post, body: Value) -> Result<Response> {
        let is_stream = body.get("stream") == Some(&Value::Bool(true));
        if !is_stream || conversation_id(&self.headers)?.is_none() {
            return self.post(post, body).await;
        }
        let task = tokio::spawn(async move { self.post(post, body).await });
        task.await
            .map_err(|error| ApiError::new(500, error.to_string()))?
    }

    /// Returns a model. If the request's stream is stopped in the meantime, returns an error.
    async fn acquire(&self, entry: Arc<Entry>, loads: Option<bool>) -> Result<Arc<App>> {
        let Some(id) = conversation_id(&self.headers)? else {
            return self.hub.acquire(entry, loads).await;
        };
        let parked = self.hub.stream_sessions.park(self.caller.owner, &id);
        tokio::select! {
            app = self.hub.acquire(entry, loads) => app,
            () = parked.stopped() => Err(ApiError::invalid("the stream was cancelled")),
        }
    }

    async fn post(&self, post: Post, body: Value) -> Result<Response> {
        let hub = &self.hub;
        if post != Post::Adapters {
            Fields::new(&body)?;
        }
        match post {
            Post::Props => {
                return Err(ApiError::not_supported(
                    "the settings of this server are those that it was started with",
                ));
            }
            Post::OllamaOther => {
                return Err(ApiError::not_supported(
                    "this server does not create, copy or send models: samite quantize writes files, and --models-cache serves what was downloaded",
                ));
            }
            Post::StreamLookup => return self.look_up_streams(&body),
            Post::ChatControl => return self.control_chat(&body),
            Post::Unload => {
                self.check_admin("unloading a model")?;
                let name = body
                    .get("model")
                    .and_then(Value::as_str)
                    .unwrap_or_default();
                if !hub.cancel_download(name) {
                    hub.unload(&*self.named(&body, false)?).await?;
                }
                return Ok(json_response(200, &json!({"success": true})));
            }
            _ => {}
        }
        if hub.is_draining.load(Ordering::SeqCst) {
            return Err(ApiError::ending());
        }
        match post {
            Post::Download => {
                self.check_admin("downloading a model")?;
                hub.download(Fields::new(&body)?.required_text("model")?, false)?;
                return Ok(json_response(200, &json!({"success": true})));
            }
            Post::OllamaPull => {
                self.check_admin("downloading a model")?;
                return ollama::pull(hub, &body).await;
            }
            _ => {}
        }
        let of_ollama = matches!(
            post,
            Post::OllamaChat
                | Post::OllamaGenerate
                | Post::OllamaEmbed
                | Post::OllamaEmbeddings
                | Post::OllamaShow
        );
        if post == Post::Load {
            self.check_admin("loading a model")?;
        }
        let entry = self.named(&body, of_ollama)?;
        let autoload = query_value(&self.query, "autoload");
        let loads = match autoload.as_deref() {
            _ if post == Post::Load => Some(true),
            None | Some("") => None,
            Some("true" | "1") => self.caller.is_admin.then_some(true),
            Some("false" | "0") => Some(false),
            Some(other) => {
                let message = format!("must be true or false, and is \"{other}\"");
                return Err(ApiError::field("autoload", message));
            }
        };
        if let Post::OllamaChat | Post::OllamaGenerate | Post::OllamaEmbed | Post::OllamaEmbeddings =
            post
            && let Some(stay) = ollama::keep_alive(&body)?
        {
            if let ollama::ModelLifetime::Leaves = stay
                && matches!(post, Post::OllamaChat | Post::OllamaGenerate)
                && ollama::is_empty(&body, post == Post::OllamaChat)
            {
                self.check_admin("unloading a model")?;
                // The request only unloads the model.
                let value = ollama::unloaded(&entry, post == Post::OllamaChat);
                if entry.is_loaded() {
                    hub.unload(&entry).await?;
                }
                return Ok(json_response(200, &value));
            }
            let app = self.acquire(Arc::clone(&entry), loads).await?;
            // Clients send this field with every request, so ignore it if the key may not set it.
            if self.caller.is_admin {
                entry.set_stay(stay.time());
            }
            return self.on_model(app, post, body).await;
        }
        let app = self.acquire(entry, loads).await?;
        self.on_model(app, post, body).await
    }

    async fn on_model(&self, app: Arc<App>, post: Post, body: Value) -> Result<Response> {
        if let Some(handle) = &app.handle {
            handle.wake();
        }
        let context = &self.context(app)?;
        match post {
            Post::Load => Ok(json_response(200, &json!({"success": true}))),
            Post::Slot => {
                let slot = self.path.trim_start_matches("/slots/");
                let action = query_value(&self.query, "action").unwrap_or_default();
                let value = slots::act(context, slot, &action, &body).await?;
                Ok(json_response(200, &value))
            }
            Post::Adapters => {
                self.check_admin("setting adapters")?;
                simple(context, body, |context, body| {
                    props::set_adapters(context, body)
                })
                .await
            }
            Post::Tokenize => simple(context, body, tokens::tokenize).await,
            Post::Detokenize => simple(context, body, tokens::detokenize).await,
            Post::ApplyTemplate => simple(context, body, tokens::apply_template).await,
            Post::CountChat => simple(context, body, tokens::count).await,
            Post::CountResponse => simple(context, body, responses::count).await,
            Post::RenderChat => simple(context, body, fleet::render_chat).await,
            Post::RenderCompletion => simple(context, body, fleet::render_completion).await,
            Post::RenderResponse => simple(context, body, fleet::render_response).await,
            Post::RenderMessage => simple(context, body, fleet::render_message).await,
            Post::CountMessage => simple(context, body, anthropic::count).await,
            Post::Native => native_completion(context, body, native::job).await,
            Post::Infill => native_completion(context, body, native::infill).await,
            Post::Completion => {
                let job = blocking(context, move |context| native::openai_job(context, &body));
                let job = job.await?;
                let encoder = openai_completions::CompletionEncoder::new(&job);
                answer(Arc::clone(context), job, encoder).await
            }
            Post::Chat => chat_completion(context, body).await,
            Post::Response => {
                let read = move |context: &RequestContext| responses::job(context, &body);
                let (job, encoder) = blocking(context, read).await?;
                answer(Arc::clone(context), job, encoder).await
            }
            Post::Message => {
                let read = move |context: &RequestContext| anthropic::job(context, &body);
                let (job, encoder) = blocking(context, read).await?;
                answer(Arc::clone(context), job, encoder).await
            }
            Post::Embeddings => embedding(context, body, embeddings::openai).await,
            Post::NativeEmbeddings => embedding(context, body, embeddings::native).await,
            Post::Rerank => embedding(context, body, embeddings::rerank).await,
            Post::OllamaShow => {
                simple(context, body, |context, body| ollama::show(context, body)).await
            }
            Post::OllamaEmbed => embedding(context, body, ollama::embed).await,
            Post::OllamaEmbeddings => embedding(context, body, ollama::embeddings).await,
            Post::OllamaChat | Post::OllamaGenerate => {
                let is_chat = post == Post::OllamaChat;
                let read = move |context: &RequestContext| ollama::job(context, &body, is_chat);
                match blocking(context, read).await? {
                    ollama::RequestedWork::Nothing(value) => Ok(json_response(200, &value)),
                    ollama::RequestedWork::Text(job, encoder) => {
                        answer(Arc::clone(context), *job, encoder).await
                    }
                }
            }
            Post::Predict => predict(context, body).await,
            Post::Props
            | Post::Unload
            | Post::Download
            | Post::OllamaPull
            | Post::OllamaOther
            | Post::StreamLookup
            | Post::ChatControl => Err(ApiError::new(500, "this is answered elsewhere")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_values_are_parsed() {
        assert_eq!(
            query_value("a=1&model=x%2Fy%", "model").as_deref(),
            Some("x/y%")
        );
        assert_eq!(query_value("a=1", "model"), None);
        assert_eq!(unescaped("%e2%82%ac%zz%4"), "€%zz%4");
    }
}
