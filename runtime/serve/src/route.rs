//! Leads each request to its interface.

use crate::access;
use crate::api::{
    anthropic, embeddings, metrics, models, native, ollama, openai_chat, openai_completions, props,
    responses, slots, tokens,
};
use crate::app::App;
use crate::chat;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::hub::Hub;
use crate::job::Job;
use crate::page;
use crate::paths::{Get, Methods, Post};
use crate::stream::{self, answer, json_response};
use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use hyper::body::Incoming;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// How the errors of an interface look.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Dialect {
    OpenAi,
    Anthropic,
    Ollama,
}

impl Dialect {
    fn of(path: &str) -> Self {
        match path {
            _ if path.starts_with("/v1/messages") => Dialect::Anthropic,
            _ if path.starts_with("/api/") => Dialect::Ollama,
            _ => Dialect::OpenAi,
        }
    }

    fn response(self, error: &ApiError) -> Response {
        let object = match self {
            Dialect::OpenAi => error.object(),
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

/// Answers a request, and logs it once its answer begins.
pub async fn handle(hub: Arc<Hub>, request: hyper::Request<Incoming>) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let start = Instant::now();
    let response = respond(hub, request).await;
    let milliseconds = start.elapsed().as_secs_f64() * 1e3;
    let status = response.status().as_u16();
    tracing::info!("{method} {path}: {status} after {milliseconds:.1} ms");
    response
}

async fn respond(hub: Arc<Hub>, request: hyper::Request<Incoming>) -> Response {
    let (parts, body) = request.into_parts();
    let options = &hub.options;
    let whole = parts.uri.path();
    let path = whole.strip_prefix(options.prefix.as_str());
    let path = path.filter(|rest| rest.starts_with('/') || options.prefix.is_empty());
    if path.is_none() && whole == options.prefix {
        // The page's own files are named from here.
        let to = HeaderValue::from_str(&format!("{whole}/"));
        let mut response = StatusCode::PERMANENT_REDIRECT.into_response();
        if let Ok(to) = to {
            response.headers_mut().insert(header::LOCATION, to);
        }
        return response;
    }
    let methods = path.and_then(|path| Methods::of(options, path));
    let path = path.unwrap_or(whole).to_owned();
    let dialect = Dialect::of(&path);
    if parts.method == Method::OPTIONS {
        let mut response = StatusCode::OK.into_response();
        access::add_cors(options, &parts.headers, response.headers_mut(), true);
        return response;
    }
    let refused = |message: &str| dialect.response(&ApiError::new(403, message));
    let is_local = hub.is_local.load(Ordering::SeqCst);
    if !access::is_own_host(options, is_local, &parts.headers) {
        return refused(
            "this server answers under its own name only: name others with --host, or set keys",
        );
    }
    let changes = ![Method::GET, Method::HEAD].contains(&parts.method);
    if changes && access::is_foreign(options, &parts.headers) {
        return refused("a page of another origin asks: name it with --cors-origins, or set keys");
    }
    let is_public = methods.is_some_and(|methods| {
        matches!(methods.get, Some(Get::Health | Get::Ready | Get::File)) && methods.post.is_none()
    });
    let result = if !is_public && !access::has_key(options, &parts.headers) {
        Err(ApiError::new(
            401,
            "Invalid API Key: send one that this server knows, as \"Authorization: Bearer KEY\" or \"X-Api-Key: KEY\"",
        ))
    } else {
        match methods {
            None => Err(ApiError::new(
                404,
                format!("File Not Found: there is no {} {path}", parts.method),
            )),
            Some(methods) => {
                let query = parts.uri.query().unwrap_or_default();
                let asked = Asked {
                    hub: &hub,
                    path: &path,
                    query,
                };
                let is_get = [Method::GET, Method::HEAD].contains(&parts.method);
                match (methods.get, methods.post) {
                    (Some(get), _) if is_get => asked.get(get),
                    (_, Some(post)) if parts.method == Method::POST => {
                        let length = parts.headers.get(header::CONTENT_LENGTH);
                        let length = length.and_then(|length| length.to_str().ok()?.parse().ok());
                        let body = hub.bodies.json(Body::new(body), length).await;
                        match body {
                            Ok(body) => asked.post(post, body).await,
                            Err(error) => Err(error),
                        }
                    }
                    _ => Err(ApiError::method(
                        parts.method.as_str(),
                        &path,
                        methods.names(),
                    )),
                }
            }
        }
    };
    let mut response = result.unwrap_or_else(|error| dialect.response(&error));
    access::add_cors(options, &parts.headers, response.headers_mut(), false);
    let name = HeaderName::from_static("x-request-id");
    if let Some(id) = parts.headers.get(&name) {
        response.headers_mut().insert(name, id.clone());
    }
    response
}

/// Does what may take a while where it holds up no other request.
async fn blocking<T: Send + 'static>(
    app: &Arc<App>,
    act: impl FnOnce(&App) -> Result<T> + Send + 'static,
) -> Result<T> {
    let app = Arc::clone(app);
    tokio::task::spawn_blocking(move || act(&app))
        .await
        .map_err(|error| ApiError::new(500, format!("the request could not be handled: {error}")))?
}

/// An answer of JSON that needs nothing but the body.
async fn simple(
    app: &Arc<App>,
    body: Value,
    act: impl FnOnce(&App, &Value) -> Result<Value> + Send + 'static,
) -> Result<Response> {
    let value = blocking(app, move |app| act(app, &body)).await?;
    Ok(json_response(200, &value))
}

/// As [`simple`], but in turn: there is one context for embeddings.
async fn embedding(
    app: &Arc<App>,
    body: Value,
    act: impl FnOnce(&App, &Value) -> Result<Value> + Send + 'static,
) -> Result<Response> {
    let full = |_| {
        ApiError::new(
            503,
            "too many requests for embeddings wait: try again later",
        )
    };
    let _place = app.embedding_queue.try_acquire().map_err(full)?;
    let gone = |_| ApiError::new(503, "the server is about to end");
    let _turn = app.embedding_turn.acquire().await.map_err(gone)?;
    let value = blocking(app, move |app| act(app, &body)).await?;
    Ok(json_response(200, &value))
}

async fn chat_completion(app: &Arc<App>, body: Value) -> Result<Response> {
    let job = blocking(app, move |app| chat::job(app, &body)).await?;
    let teller = openai_chat::ChatTeller::new(&job);
    answer(Arc::clone(app), job, teller).await
}

async fn native_completion(
    app: &Arc<App>,
    body: Value,
    read: fn(&App, &Value) -> Result<(Job, bool)>,
) -> Result<Response> {
    let (job, is_list) = blocking(app, move |app| {
        chat::no_echo(&Fields::new(&body)?)?;
        read(app, &body)
    })
    .await?;
    let kept = Job {
        requests: Vec::new(),
        ..job.clone()
    };
    answer(
        Arc::clone(app),
        job,
        native::NativeTeller { job: kept, is_list },
    )
    .await
}

/// A member of a query, or of a path.
fn query_value(query: &str, name: &str) -> Option<String> {
    query.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=')?;
        (key == name).then(|| unescaped(value))
    })
}

/// A text without its `%` escapes.
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

/// Whether new requests are taken.
fn ready(hub: &Hub) -> Result<Response> {
    match hub.is_draining.load(Ordering::SeqCst) {
        true => Err(ApiError::new(503, "the server is about to end")),
        false => Ok(json_response(200, &json!({"status": "ok"}))),
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

async fn predict(app: &Arc<App>, body: Value) -> Result<Response> {
    let instances = body.get("instances").and_then(Value::as_array).cloned();
    let instances = instances.ok_or_else(|| ApiError::field("instances", "must be a list"))?;
    let mut running = Vec::new();
    for instance in instances {
        let job = blocking(app, move |app| chat::job(app, &instance)).await?;
        let mut teller = openai_chat::ChatTeller::new(&job);
        let mut job = job;
        let submitted = blocking(app, move |app| stream::Running::submit(app, &mut job)).await?;
        running.push(async move {
            let choices = submitted.all().await?;
            Ok::<_, ApiError>(stream::Teller::whole(&mut teller, &choices))
        });
    }
    let mut predictions = Vec::new();
    for one in running {
        predictions.push(one.await?);
    }
    Ok(json_response(200, &json!({"predictions": predictions})))
}

/// A request that may be answered.
struct Asked<'r> {
    hub: &'r Arc<Hub>,
    path: &'r str,
    query: &'r str,
}

impl Asked<'_> {
    /// The model that the query names, if it is there.
    fn look(&self) -> Result<Arc<App>> {
        self.hub.look(query_value(self.query, "model").as_deref())
    }

    fn get(&self, get: Get) -> Result<Response> {
        let hub = self.hub;
        let value = match get {
            Get::Health => json!({"status": "ok"}),
            Get::Ready => return ready(hub),
            Get::Metrics => return told_metrics(&*self.look()?),
            Get::File => {
                let none = || ApiError::new(404, "there is no such file");
                return page::file(self.path).ok_or_else(none);
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
            Get::Props => props::props(&*self.look()?)?,
            Get::Plan => self.look()?.options.plan.clone(),
            Get::Slots => match hub.options.slots {
                true => slots::list(&*self.look()?)?,
                false => {
                    return Err(ApiError::not_supported(
                        "this server does not tell about slots: start it without --no-slots",
                    ));
                }
            },
            Get::Adapters => props::adapters(&*self.look()?),
            Get::OllamaVersion => ollama::version(),
            Get::OllamaTags => ollama::tags(hub),
            Get::OllamaPs => ollama::ps(hub),
        };
        Ok(json_response(200, &value))
    }

    /// The number of the model that the body or the query names. A server of one model answers for
    /// any name, but not to ollama's clients, who pull a model that is not there.
    fn named(&self, body: &Value, of_ollama: bool) -> Result<usize> {
        let name = match body.get("model").or_else(|| body.get("name")) {
            None | Some(Value::Null) => query_value(self.query, "model"),
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

    async fn post(&self, post: Post, body: Value) -> Result<Response> {
        let hub = self.hub;
        match post {
            Post::Props => {
                return Err(ApiError::not_supported(
                    "the settings of this server are those that it was started with",
                ));
            }
            Post::OllamaOther => {
                return Err(ApiError::not_supported(
                    "this server has the models that it was started with: samite pull and samite models manage others",
                ));
            }
            Post::Unload => {
                hub.unload(self.named(&body, false)?).await?;
                return Ok(json_response(200, &json!({"success": true})));
            }
            _ => {}
        }
        if hub.is_draining.load(Ordering::SeqCst) {
            return Err(ApiError::new(503, "the server is about to end"));
        }
        let of_ollama = matches!(
            post,
            Post::OllamaChat
                | Post::OllamaGenerate
                | Post::OllamaEmbed
                | Post::OllamaEmbeddings
                | Post::OllamaShow
        );
        let at = self.named(&body, of_ollama)?;
        let autoload = query_value(self.query, "autoload");
        let loads = match (post, autoload.as_deref()) {
            (Post::Load, _) | (_, Some("true" | "1")) => Some(true),
            (_, Some("false" | "0")) => Some(false),
            _ => None,
        };
        if let Post::OllamaChat | Post::OllamaGenerate | Post::OllamaEmbed | Post::OllamaEmbeddings =
            post
            && let Some(stay) = ollama::keep_alive(&body)?
        {
            if let ollama::Stay::Leaves = stay
                && ollama::is_empty(&body, post == Post::OllamaChat)
            {
                // Nothing but to give it up.
                let value = ollama::unloaded(&hub.entries()[at], post == Post::OllamaChat);
                if hub.entries()[at].is_loaded() {
                    hub.unload(at).await?;
                }
                return Ok(json_response(200, &value));
            }
            let app = hub.acquire(at, loads).await?;
            hub.set_stay(at, stay.time());
            return self.on_model(&app, post, body).await;
        }
        let app = hub.acquire(at, loads).await?;
        self.on_model(&app, post, body).await
    }

    async fn on_model(&self, app: &Arc<App>, post: Post, body: Value) -> Result<Response> {
        if let Some(handle) = &app.handle {
            handle.wake();
        }
        match post {
            Post::Load => Ok(json_response(200, &json!({"success": true}))),
            Post::Slot => {
                let slot = self.path.trim_start_matches("/slots/");
                let action = query_value(self.query, "action").unwrap_or_default();
                let value = slots::act(app, slot, &action, &body).await?;
                Ok(json_response(200, &value))
            }
            Post::Adapters => simple(app, body, props::set_adapters).await,
            Post::Tokenize => simple(app, body, tokens::tokenize).await,
            Post::Detokenize => simple(app, body, tokens::detokenize).await,
            Post::ApplyTemplate => simple(app, body, tokens::apply_template).await,
            Post::CountChat => simple(app, body, tokens::count).await,
            Post::CountResponse => simple(app, body, responses::count).await,
            Post::CountMessage => simple(app, body, anthropic::count).await,
            Post::Native => native_completion(app, body, native::job).await,
            Post::Infill => native_completion(app, body, native::infill).await,
            Post::Completion => {
                let job = blocking(app, move |app| native::openai_job(app, &body)).await?;
                let teller = openai_completions::CompletionTeller::new(&job);
                answer(Arc::clone(app), job, teller).await
            }
            Post::Chat => chat_completion(app, body).await,
            Post::Response => {
                let (job, teller) = blocking(app, move |app| responses::job(app, &body)).await?;
                answer(Arc::clone(app), job, teller).await
            }
            Post::Message => {
                let (job, teller) = blocking(app, move |app| anthropic::job(app, &body)).await?;
                answer(Arc::clone(app), job, teller).await
            }
            Post::Embeddings => embedding(app, body, embeddings::openai).await,
            Post::NativeEmbeddings => embedding(app, body, embeddings::native).await,
            Post::Rerank => embedding(app, body, embeddings::rerank).await,
            Post::OllamaShow => simple(app, body, ollama::show).await,
            Post::OllamaEmbed => embedding(app, body, ollama::embed).await,
            Post::OllamaEmbeddings => embedding(app, body, ollama::embeddings).await,
            Post::OllamaChat | Post::OllamaGenerate => {
                let is_chat = post == Post::OllamaChat;
                match blocking(app, move |app| ollama::job(app, &body, is_chat)).await? {
                    ollama::Asked::Nothing(value) => Ok(json_response(200, &value)),
                    ollama::Asked::Text(job, teller) => answer(Arc::clone(app), *job, teller).await,
                }
            }
            Post::Predict => predict(app, body).await,
            Post::Props | Post::Unload | Post::OllamaOther => {
                Err(ApiError::new(500, "this is answered elsewhere"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_read() {
        assert_eq!(
            query_value("a=1&model=x%2Fy%", "model").as_deref(),
            Some("x/y%")
        );
        assert_eq!(query_value("a=1", "model"), None);
        assert_eq!(unescaped("%e2%82%ac%zz%4"), "€%zz%4");
    }
}
