//! Listens, and leads each request to its interface.

use crate::access;
use crate::api::{
    anthropic, embeddings, models, native, ollama, openai_chat, openai_completions, props,
    responses, slots, tokens,
};
use crate::app::App;
use crate::chat;
use crate::error::{ApiError, Result};
use crate::fields::depth;
use crate::job::Job;
use crate::page;
use crate::stream::{self, answer, json_response};
use axum::body::{Body, Bytes, to_bytes};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use samite_core::CancelToken;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Deepest nesting of a body.
const DEEPEST: usize = 64;
/// How long a body may take to come.
const BODY_TIME: Duration = Duration::from_secs(60);
/// How long the headers of the next request may take to come.
const HEADER_TIME: Duration = Duration::from_secs(75);

/// Serves until `stop` is cancelled, and then answers what is there. `ready` is told the addresses.
///
/// # Errors
/// If an address cannot be listened at.
pub fn serve(app: Arc<App>, stop: &CancelToken, ready: impl FnOnce(&[String])) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(64)
        .enable_all()
        .thread_name("http")
        .build()?;
    let result = runtime.block_on(run(app, stop, ready));
    // What still blocks, such as a grammar that is being compiled, is left behind.
    runtime.shutdown_timeout(Duration::from_millis(100));
    result
}

async fn run(app: Arc<App>, stop: &CancelToken, ready: impl FnOnce(&[String])) -> io::Result<()> {
    let mut listeners = Vec::new();
    for host in &app.options.hosts {
        let host = host.trim().trim_start_matches('[').trim_end_matches(']');
        let listener = TcpListener::bind((host, app.options.port)).await;
        listeners.push(listener.map_err(|error| {
            let place = format!("{host}:{}", app.options.port);
            io::Error::new(error.kind(), format!("cannot listen at {place}: {error}"))
        })?);
    }
    let addresses = listeners
        .iter()
        .map(|listener| Ok(listener.local_addr()?.to_string()));
    ready(&addresses.collect::<io::Result<Vec<_>>>()?);
    let (sender, receiver) = watch::channel(false);
    let mut tasks = Vec::new();
    for listener in listeners {
        tasks.push(tokio::spawn(listen(
            listener,
            Arc::clone(&app),
            receiver.clone(),
        )));
    }
    while !stop.is_cancelled() && !is_broken(&app) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let has_ended = is_broken(&app);
    app.is_draining.store(true, Ordering::SeqCst);
    let _ = sender.send(true);
    if let Some(handle) = &app.handle {
        handle.close();
    }
    let all = async {
        for task in &mut tasks {
            let _ = task.await;
        }
    };
    let time = Duration::from_secs(app.options.drain_seconds);
    if tokio::time::timeout(time, all).await.is_err() {
        tracing::warn!("requests that take too long are ended");
    }
    if let Some(handle) = &app.handle {
        handle.end();
    }
    match has_ended {
        true => Err(io::Error::other("the engine has ended")),
        false => Ok(()),
    }
}

/// Takes connections until the server is told to end, and then waits for what they still answer.
async fn listen(listener: TcpListener, app: Arc<App>, stopped: watch::Receiver<bool>) {
    let mut connections = JoinSet::new();
    let mut end = stopped.clone();
    let mut told = pin!(async move {
        let _ = end.wait_for(|stopped| *stopped).await;
    });
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let _ = stream.set_nodelay(true);
                    connections.spawn(connection(stream, Arc::clone(&app), stopped.clone()));
                }
                // Too many files are open, for example: others may be closed soon.
                Err(error) => {
                    tracing::warn!(%error, "a connection cannot be taken");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
            () = told.as_mut() => break,
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Answers what comes over a connection.
async fn connection(stream: TcpStream, app: Arc<App>, mut stopped: watch::Receiver<bool>) {
    let service = service_fn(move |request| {
        let app = Arc::clone(&app);
        async move { Ok::<_, Infallible>(handle(app, request).await) }
    });
    let mut builder = http1::Builder::new();
    // Headers as clients of llama-server know them.
    builder.title_case_headers(true);
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let told = async move {
        let _ = stopped.wait_for(|stopped| *stopped).await;
    };
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = told => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended");
    }
}

/// Whether the engine is gone though nobody ended it.
fn is_broken(app: &App) -> bool {
    !app.is_draining.load(Ordering::SeqCst)
        && app
            .handle
            .as_ref()
            .is_some_and(samite_requests::Handle::is_over)
}

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
        if error.status == 503 {
            let retry = HeaderValue::from_static("1");
            response.headers_mut().insert(header::RETRY_AFTER, retry);
        }
        response
    }
}

async fn handle(app: Arc<App>, request: hyper::Request<Incoming>) -> Response {
    let (parts, body) = request.into_parts();
    let body = Body::new(body);
    let path = parts.uri.path();
    let path = path
        .strip_prefix(app.options.prefix.as_str())
        .unwrap_or(path)
        .to_owned();
    let dialect = Dialect::of(&path);
    if parts.method == Method::OPTIONS {
        let mut response = StatusCode::OK.into_response();
        access::add_cors(&app, &parts.headers, response.headers_mut(), true);
        return response;
    }
    if !access::is_own_host(&app, &parts.headers) {
        let message =
            "this server answers under its own name only: name others with --host, or set keys";
        return dialect.response(&ApiError::new(403, message));
    }
    let is_public = ["/health", "/v1/health", "/ready"].contains(&path.as_str())
        || app.options.page && page::is_file(&path);
    let result = if !is_public && !access::has_key(&app, &parts.headers) {
        Err(ApiError::new(
            401,
            "Invalid API Key: send one that this server knows, as \"Authorization: Bearer KEY\" or \"X-Api-Key: KEY\"",
        ))
    } else {
        let query = parts.uri.query().unwrap_or_default().to_owned();
        route(&app, &parts.method, &path, &query, body).await
    };
    let mut response = result.unwrap_or_else(|error| dialect.response(&error));
    access::add_cors(&app, &parts.headers, response.headers_mut(), false);
    let name = HeaderName::from_static("x-request-id");
    if let Some(id) = parts.headers.get(&name) {
        response.headers_mut().insert(name, id.clone());
    }
    response
}

/// The body as JSON; without one, an empty object.
async fn json_body(app: &App, body: Body) -> Result<Value> {
    let limit = app.options.body_limit;
    let read = tokio::time::timeout(BODY_TIME, to_bytes(body, limit)).await;
    let bytes: Bytes = match read {
        Err(_) => return Err(ApiError::new(408, "the body did not come in time")),
        Ok(Err(error)) => {
            let is_large = std::error::Error::source(&error)
                .is_some_and(|source| source.to_string().contains("length limit"));
            return Err(match is_large {
                true => ApiError::new(413, format!("the body has more than {limit} bytes")),
                false => ApiError::invalid(format!("the body cannot be read: {error}")),
            });
        }
        Ok(Ok(bytes)) => bytes,
    };
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Ok(json!({}));
    }
    if depth(&bytes) > DEEPEST {
        return Err(ApiError::invalid(format!(
            "the body is nested more than {DEEPEST} deep"
        )));
    }
    // A large one takes a while, and other connections go on.
    let parsed = tokio::task::spawn_blocking(move || serde_json::from_slice(&bytes)).await;
    let parsed = parsed.map_err(|error| ApiError::new(500, error.to_string()))?;
    parsed.map_err(|error| ApiError::invalid(format!("the body is not valid JSON: {error}")))
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
    body: Body,
    act: impl FnOnce(&App, &Value) -> Result<Value> + Send + 'static,
) -> Result<Response> {
    let body = json_body(app, body).await?;
    let value = blocking(app, move |app| act(app, &body)).await?;
    Ok(json_response(200, &value))
}

/// As [`simple`], but in turn: there is one context for embeddings.
async fn embedding(
    app: &Arc<App>,
    body: Body,
    act: impl FnOnce(&App, &Value) -> Result<Value> + Send + 'static,
) -> Result<Response> {
    let full = |_| {
        ApiError::new(
            503,
            "too many requests for embeddings wait: try again later",
        )
    };
    let _place = app.embedding_queue.try_acquire().map_err(full)?;
    let body = json_body(app, body).await?;
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
    body: Body,
    read: fn(&App, &Value) -> Result<(Job, bool)>,
) -> Result<Response> {
    let body = json_body(app, body).await?;
    let (job, is_list) = blocking(app, move |app| read(app, &body)).await?;
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

/// A member of a query.
fn query_value<'a>(query: &'a str, name: &str) -> Option<&'a str> {
    query.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=')?;
        (key == name).then_some(value)
    })
}

fn health(app: &App) -> Result<Response> {
    match app.is_draining.load(Ordering::SeqCst) {
        true => Err(ApiError::new(503, "the server is about to end")),
        false => Ok(json_response(200, &json!({"status": "ok"}))),
    }
}

fn metrics(app: &App) -> Result<Response> {
    if !app.options.metrics {
        return Err(ApiError::not_supported(
            "this server tells no metrics: start it with --metrics",
        ));
    }
    let mut response = Body::from(props::metrics(app)?).into_response();
    let headers = response.headers_mut();
    let kind = HeaderValue::from_static("text/plain; version=0.0.4");
    headers.insert(header::CONTENT_TYPE, kind);
    headers.insert("process-start-time-unix", HeaderValue::from(app.started));
    Ok(response)
}

async fn predict(app: &Arc<App>, body: Body) -> Result<Response> {
    let body = json_body(app, body).await?;
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

async fn route(
    app: &Arc<App>,
    method: &Method,
    path: &str,
    query: &str,
    body: Body,
) -> Result<Response> {
    let get = method == Method::GET || method == Method::HEAD;
    let post = method == Method::POST;
    if let Some(handle) = app.handle.as_ref().filter(|_| post) {
        handle.wake();
    }
    match path {
        "/health" | "/v1/health" | "/ready" if get => health(app),
        "/v1/models" | "/models" if get => Ok(json_response(200, &models::list(app))),
        "/props" if get => Ok(json_response(200, &props::props(app)?)),
        "/props" if post => Err(ApiError::not_supported(
            "the settings of this server are those that it was started with",
        )),
        "/metrics" if get => metrics(app),
        "/plan" if get && !app.options.plan.is_null() => Ok(json_response(200, &app.options.plan)),
        "/slots" if get => match app.options.slots {
            true => Ok(json_response(200, &slots::list(app)?)),
            false => Err(ApiError::not_supported(
                "this server does not tell about slots: start it without --no-slots",
            )),
        },
        _ if post && path.starts_with("/slots/") => {
            let slot = path.trim_start_matches("/slots/").to_owned();
            let body = json_body(app, body).await?;
            let action = query_value(query, "action").unwrap_or_default();
            Ok(json_response(
                200,
                &slots::act(app, &slot, action, &body).await?,
            ))
        }
        "/lora-adapters" if get => Ok(json_response(200, &props::adapters(app))),
        "/lora-adapters" if post => simple(app, body, props::set_adapters).await,
        "/tokenize" if post => simple(app, body, tokens::tokenize).await,
        "/detokenize" if post => simple(app, body, tokens::detokenize).await,
        "/apply-template" if post => simple(app, body, tokens::apply_template).await,
        "/chat/completions/input_tokens" | "/v1/chat/completions/input_tokens" if post => {
            simple(app, body, tokens::count).await
        }
        "/completion" | "/completions" if post => native_completion(app, body, native::job).await,
        "/infill" if post => native_completion(app, body, native::infill).await,
        "/v1/completions" if post => {
            let body = json_body(app, body).await?;
            let (job, _) = blocking(app, move |app| native::job(app, &body)).await?;
            let teller = openai_completions::CompletionTeller::new(&job);
            answer(Arc::clone(app), job, teller).await
        }
        "/chat/completions" | "/v1/chat/completions" if post => {
            let body = json_body(app, body).await?;
            chat_completion(app, body).await
        }
        "/responses" | "/v1/responses" if post => {
            let body = json_body(app, body).await?;
            let (job, teller) = blocking(app, move |app| responses::job(app, &body)).await?;
            answer(Arc::clone(app), job, teller).await
        }
        "/responses/input_tokens" | "/v1/responses/input_tokens" if post => {
            simple(app, body, responses::count).await
        }
        "/v1/messages" if post => {
            let body = json_body(app, body).await?;
            let (job, teller) = blocking(app, move |app| anthropic::job(app, &body)).await?;
            answer(Arc::clone(app), job, teller).await
        }
        "/v1/messages/count_tokens" if post => simple(app, body, anthropic::count).await,
        "/v1/embeddings" if post => embedding(app, body, embeddings::openai).await,
        "/embedding" | "/embeddings" if post => embedding(app, body, embeddings::native).await,
        "/rerank" | "/reranking" | "/v1/rerank" | "/v1/reranking" if post => {
            embedding(app, body, embeddings::rerank).await
        }
        "/api/version" if get => Ok(json_response(200, &ollama::version())),
        "/api/tags" if get => Ok(json_response(200, &ollama::tags(app))),
        "/api/ps" if get => Ok(json_response(200, &ollama::ps(app))),
        "/api/show" if post => simple(app, body, ollama::show).await,
        "/api/embed" if post => embedding(app, body, ollama::embed).await,
        "/api/embeddings" if post => embedding(app, body, ollama::embeddings).await,
        "/api/chat" | "/api/generate" if post => {
            let is_chat = path == "/api/chat";
            let body = json_body(app, body).await?;
            match blocking(app, move |app| ollama::job(app, &body, is_chat)).await? {
                ollama::Asked::Nothing(value) => Ok(json_response(200, &value)),
                ollama::Asked::Text(job, teller) => answer(Arc::clone(app), *job, teller).await,
            }
        }
        "/api/pull" | "/api/push" | "/api/create" | "/api/copy" | "/api/delete" => {
            Err(ApiError::not_supported(
                "this server has the model that it was started with: samite pull and samite models manage others",
            ))
        }
        _ if post && app.options.predict_path.as_deref() == Some(path) => predict(app, body).await,
        _ if get && app.options.page && page::is_file(path) => {
            page::file(path).ok_or_else(|| ApiError::new(404, "there is no such file"))
        }
        _ => Err(ApiError::new(
            404,
            format!("File Not Found: there is no {method} {path}"),
        )),
    }
}
