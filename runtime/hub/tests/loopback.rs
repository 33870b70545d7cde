//! Downloads from a loopback hub that stalls, disconnects and sends wrong data.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

use ring::digest::{SHA256, digest};
use samite_core::CancelToken;
use samite_core::environment::{Clock, SystemClock};
use samite_hub::{Cache, DownloadProgress, Error, Hub, HubOptions, Listing, Reference};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn content(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

/// A request: its path, and its headers in lower case.
#[derive(Clone, Debug)]
struct Request {
    path: String,
    headers: Vec<String>,
}

impl Request {
    fn header(&self, name: &str) -> Option<&str> {
        let line = self.headers.iter().find_map(|line| line.strip_prefix(name));
        line.and_then(|rest| rest.strip_prefix(": "))
    }

    /// Returns the first byte requested.
    fn first(&self) -> usize {
        let range = self
            .header("range")
            .and_then(|range| range.strip_prefix("bytes="));
        range.map_or(0, |range| range.trim_end_matches('-').parse().unwrap())
    }
}

/// Handles a request; returning `false` closes the connection.
type Answer = dyn Fn(&Request, &mut TcpStream, usize) + Send + Sync;

struct Server {
    address: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    /// `answer` receives the number of earlier requests for the same path.
    fn start(answer: impl Fn(&Request, &mut TcpStream, usize) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let requests: Arc<Mutex<Vec<Request>>> = Arc::default();
        let answer: Arc<Answer> = Arc::new(answer);
        let known = Arc::clone(&requests);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (answer, known) = (Arc::clone(&answer), Arc::clone(&known));
                std::thread::spawn(move || serve(stream.unwrap(), &*answer, &known));
            }
        });
        Server { address, requests }
    }

    fn hub(&self) -> Hub {
        // The server is fast, but the machine may be busy.
        self.hub_with_patience(Duration::from_secs(60))
    }

    /// Returns a client for servers that stall.
    fn impatient_hub(&self) -> Hub {
        self.hub_with_patience(Duration::from_secs(1))
    }

    fn hub_with_patience(&self, patience: Duration) -> Hub {
        Hub::new(HubOptions {
            endpoint: self.address.clone(),
            token: Some("secret".to_owned()),
            patience,
            attempts: 3,
            clock: Arc::new(SystemClock),
        })
    }

    fn count(&self, part: &str) -> usize {
        let requests = self.requests.lock().unwrap();
        requests
            .iter()
            .filter(|request| request.path.contains(part))
            .count()
    }
}

fn serve(mut stream: TcpStream, answer: &Answer, known: &Mutex<Vec<Request>>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap())
        .lines()
        .map_while(Result::ok);
    let Some(first) = lines.next() else { return };
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let headers = lines.take_while(|line| !line.is_empty());
    let headers = headers.map(|line| match line.split_once(": ") {
        Some((name, value)) => format!("{}: {value}", name.to_lowercase()),
        None => line,
    });
    let request = Request {
        path,
        headers: headers.collect(),
    };
    let before = {
        let mut known = known.lock().unwrap();
        let before = known
            .iter()
            .filter(|before| before.path == request.path)
            .count();
        known.push(request.clone());
        before
    };
    answer(&request, &mut stream, before);
}

/// Sends a response whose header announces `length` bytes. Ignores a closed connection.
fn send(stream: &mut TcpStream, status: &str, headers: &str, length: usize, body: &[u8]) {
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n{headers}\r\n"
    );
    let _ = stream
        .write_all(head.as_bytes())
        .and_then(|()| stream.write_all(body));
}

fn ok(stream: &mut TcpStream, body: &[u8]) {
    send(stream, "200 OK", "", body.len(), body);
}

/// Sends nothing until the client closes the connection.
fn fall_silent(stream: &mut TcpStream) {
    while matches!(stream.read(&mut [0; 64]), Ok(1..)) {}
}

/// Sends a file from the requested byte on, as a correct server does, but at most `most` bytes.
fn send_file(request: &Request, stream: &mut TcpStream, file: &[u8], most: usize) {
    let first = request.first();
    let rest = &file[first.min(file.len())..];
    let sent = &rest[..most.min(rest.len())];
    match request.header("range") {
        Some(_) => {
            let range = format!(
                "content-range: bytes {first}-{}/{}\r\n",
                file.len() - 1,
                file.len()
            );
            send(stream, "206 Partial Content", &range, rest.len(), sent);
        }
        None => send(stream, "200 OK", "", rest.len(), sent),
    }
}

/// Sends the hub's description of a repository with these files.
fn describe(request: &Request, stream: &mut TcpStream, files: &[(&str, usize, String)]) -> bool {
    if request.path.contains("/revision/") {
        ok(
            stream,
            format!(r#"{{"sha":"{COMMIT}","private":false}}"#).as_bytes(),
        );
        return true;
    }
    if request.path.contains("/tree/") {
        let entries = files.iter().map(|(path, size, hash)| {
            format!(r#"{{"type":"file","path":"{path}","size":{size},"oid":"{COMMIT}","lfs":{{"oid":"{hash}","size":{size}}}}}"#)
        });
        ok(
            stream,
            format!("[{}]", entries.collect::<Vec<_>>().join(",")).as_bytes(),
        );
        return true;
    }
    false
}

/// Starts a hub with one model of these bytes, which `answer` sends.
fn one_model(
    bytes: &[u8],
    answer: impl Fn(&Request, &mut TcpStream, usize) + Send + Sync + 'static,
) -> Server {
    let hash = hex(digest(&SHA256, bytes).as_ref());
    let files = vec![("m-Q4_K_M.gguf", bytes.len(), hash)];
    Server::start(move |request, stream, before| {
        if !describe(request, stream, &files) {
            answer(request, stream, before);
        }
    })
}

struct Place {
    _folder: tempfile::TempDir,
    cache: Cache,
}

fn place() -> Place {
    let folder = tempfile::tempdir().unwrap();
    Place {
        cache: Cache::new(folder.path().join("hub")),
        _folder: folder,
    }
}

fn reference() -> Reference {
    "owner/name".parse().unwrap()
}

fn fetch(hub: &Hub, cache: &Cache) -> Result<PathBuf, Error> {
    let listing = hub.list(&reference(), "main")?;
    fetch_listed(hub, cache, &listing)
}

fn fetch_listed(hub: &Hub, cache: &Cache, listing: &Listing) -> Result<PathBuf, Error> {
    let file = listing.choose(&reference())?[0];
    let cancel = CancelToken::new();
    hub.fetch(cache, listing, file, &mut |_| (), &cancel)
}

/// Asserts that no complete file exists; an incomplete download may.
fn nothing_there(cache: &Cache) {
    assert_eq!(cache.models().unwrap(), []);
    assert_eq!(cache.find(&reference(), "main"), None);
    let blobs = cache.folder().join("models--owner--name/blobs");
    for entry in std::fs::read_dir(blobs).into_iter().flatten() {
        let name = entry.unwrap().file_name();
        assert!(name.to_str().unwrap().ends_with(".incomplete"), "{name:?}");
    }
}

#[test]
fn a_model_is_downloaded_completely_and_once() {
    let bytes = content(1_000_000);
    let file = bytes.clone();
    let server = one_model(&bytes, move |request, stream, _| {
        send_file(request, stream, &file, usize::MAX)
    });
    let (hub, place) = (server.hub(), place());
    let listing = hub.list(&reference(), "main").unwrap();
    let mut heard = Vec::new();
    let file = listing.choose(&reference()).unwrap()[0];
    let path = hub
        .fetch(
            &place.cache,
            &listing,
            file,
            &mut |progress| heard.push(progress),
            &CancelToken::new(),
        )
        .unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
    assert!(path.ends_with(format!(
        "models--owner--name/snapshots/{COMMIT}/m-Q4_K_M.gguf"
    )));
    assert_eq!(heard.first(), Some(&DownloadProgress::Received(0)));
    assert_eq!(heard.last(), Some(&DownloadProgress::Checked(1_000_000)));
    assert!(heard.contains(&DownloadProgress::Received(1_000_000)));
    #[cfg(unix)]
    assert!(
        std::fs::read_link(&path)
            .unwrap()
            .starts_with("../../blobs")
    );

    assert_eq!(fetch(&hub, &place.cache).unwrap(), path);
    assert_eq!(server.count("/resolve/"), 1);
    assert_eq!(place.cache.find(&reference(), "main"), Some(path.clone()));
    let models = place.cache.models().unwrap();
    assert_eq!(
        (models[0].repository.as_str(), models[0].size),
        ("owner/name", 1_000_000)
    );
    assert_eq!(models[0].path, path);
    let wanted = "owner/name:q4_k_m".parse().unwrap();
    assert_eq!(place.cache.remove(&wanted).unwrap(), 1_000_000);
    nothing_there(&place.cache);
    place.cache.remove(&wanted).unwrap_err();
    place.cache.remove(&reference()).unwrap();
    place.cache.remove(&reference()).unwrap_err();
}

#[test]
fn a_name_resolves_to_a_file_online_and_offline() {
    let bytes = content(1000);
    let file = bytes.clone();
    let server = one_model(&bytes, move |request, stream, _| {
        send_file(request, stream, &file, usize::MAX)
    });
    let place = place();
    let path = server.hub().download(&place.cache, &reference()).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), bytes);

    let requests = server.count("resolve");
    server.hub().download(&place.cache, &reference()).unwrap();
    assert_eq!(server.count("resolve"), requests, "it was downloaded again");

    let unreachable = Hub::new(HubOptions {
        endpoint: "http://127.0.0.1:1".to_owned(),
        attempts: 0,
        ..HubOptions::default()
    });
    let cached = unreachable.download(&place.cache, &reference()).unwrap();
    assert_eq!(cached, path);
    let unknown = "owner/other".parse().unwrap();
    let error = unreachable.download(&place.cache, &unknown).unwrap_err();
    assert!(error.is_connection(), "{error}");
}

#[test]
fn small_files_are_verified_with_the_git_hash() {
    // Output of `echo hello | git hash-object --stdin`.
    const HASH: &str = "ce013625030ba8dba906f756967f9e9ca394464a";
    for (sent, is_right) in [("hello\n", true), ("jello\n", false)] {
        let server = Server::start(move |request, stream, _| {
            if request.path.contains("/tree/") {
                let entry =
                    format!(r#"[{{"type":"file","path":"m.gguf","size":6,"oid":"{HASH}"}}]"#);
                ok(stream, entry.as_bytes());
            } else if !describe(request, stream, &[]) {
                send_file(request, stream, sent.as_bytes(), usize::MAX);
            }
        });
        let place = place();
        match fetch(&server.hub(), &place.cache) {
            Ok(path) => {
                assert!(is_right);
                assert_eq!(std::fs::read(path).unwrap(), sent.as_bytes());
            }
            Err(error) => {
                let error = error.to_string();
                assert!(
                    !is_right && error.contains("git hash") && error.contains(HASH),
                    "{error}"
                );
                nothing_there(&place.cache);
            }
        }
    }
}

#[cfg(unix)]
#[test]
fn a_linked_model_outside_the_cache_is_not_deleted() {
    let bytes = content(1000);
    let file = bytes.clone();
    let server = one_model(&bytes, move |request, stream, _| {
        send_file(request, stream, &file, usize::MAX);
    });
    let place = place();
    let path = fetch(&server.hub(), &place.cache).unwrap();
    let own = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(own.path(), &bytes).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink(own.path(), &path).unwrap();
    let wanted = "owner/name:q4_k_m".parse().unwrap();
    assert_eq!(place.cache.remove(&wanted).unwrap(), 0);
    assert!(path.symlink_metadata().is_err());
    assert_eq!(std::fs::read(own.path()).unwrap(), bytes);
}

#[test]
fn a_broken_download_resumes() {
    let bytes = content(900_000);
    let file = bytes.clone();
    // Each response ends after at most 100,000 bytes; some stall then.
    let server = one_model(&bytes, move |request, stream, before| {
        send_file(request, stream, &file, 100_000);
        if before % 3 == 2 {
            fall_silent(stream);
        }
    });
    let place = place();
    let path = fetch(&server.impatient_hub(), &place.cache).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), bytes);
    let requests = server.requests.lock().unwrap();
    let firsts: Vec<usize> = requests
        .iter()
        .filter(|r| r.path.contains("/resolve/"))
        .map(Request::first)
        .collect();
    assert!(
        firsts.len() >= 9 && firsts.is_sorted() && firsts[1] > 0,
        "{firsts:?}"
    );
}

#[test]
fn another_process_resumes_a_download() {
    let bytes = content(500_000);
    let file = bytes.clone();
    let server = one_model(&bytes, move |request, stream, before| {
        let most = if before == 0 { 200_000 } else { usize::MAX };
        send_file(request, stream, &file, most);
        if before == 0 {
            fall_silent(stream);
        }
    });
    let (hub, place) = (server.impatient_hub(), place());
    let listing = hub.list(&reference(), "main").unwrap();
    let file = listing.choose(&reference()).unwrap()[0];
    let cancel = CancelToken::new();
    let stop = cancel.clone();
    let error = hub.fetch(
        &place.cache,
        &listing,
        file,
        &mut |progress| {
            if matches!(progress, DownloadProgress::Received(100_000..)) {
                stop.cancel();
            }
        },
        &cancel,
    );
    assert!(matches!(error, Err(Error::Cancelled)), "{error:?}");
    nothing_there(&place.cache);
    let path = fetch(&server.hub(), &place.cache).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), bytes);
    assert!(server.requests.lock().unwrap().last().unwrap().first() > 0);
}

#[test]
fn a_server_without_ranges_restarts_the_download() {
    let bytes = content(300_000);
    let file = bytes.clone();
    let server = one_model(&bytes, move |_, stream, before| {
        let sent = if before == 0 { 100_000 } else { file.len() };
        send(stream, "200 OK", "", file.len(), &file[..sent]);
    });
    let place = place();
    let path = fetch(&server.hub(), &place.cache).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), bytes);
}

#[test]
fn a_silent_server_times_out() {
    let bytes = content(300_000);
    let file = bytes.clone();
    let server = one_model(&bytes, move |request, stream, _| {
        if request.first() == 0 {
            send_file(request, stream, &file, 50_000);
        }
        fall_silent(stream);
    });
    let place = place();
    let error = fetch(&server.impatient_hub(), &place.cache).unwrap_err();
    assert!(
        error.is_connection() && error.to_string().contains("go on"),
        "{error}"
    );
    nothing_there(&place.cache);
}

#[test]
fn wrong_server_data_is_reported() {
    let bytes = content(200_000);
    let wrong = {
        let mut wrong = bytes.clone();
        wrong[150_000] ^= 1;
        wrong
    };
    let longer = content(200_001);
    type Lie = Box<dyn Fn(&Request, &mut TcpStream) + Send + Sync>;
    let chunked = |body: Vec<u8>| -> Lie {
        Box::new(move |_, stream| {
            let head = format!(
                "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n{:x}\r\n",
                body.len()
            );
            let _ = stream.write_all(head.as_bytes());
            let _ = stream
                .write_all(&body)
                .and_then(|()| stream.write_all(b"\r\n0\r\n\r\n"));
        })
    };
    let lies: Vec<(Lie, &str)> = vec![
        (
            Box::new(move |request, stream| send_file(request, stream, &wrong, usize::MAX)),
            "SHA-256",
        ),
        (
            Box::new(|_, stream| ok(stream, &content(100))),
            "sends 100 bytes",
        ),
        (chunked(longer), "more than the 200000 bytes"),
        (
            Box::new(|_, stream| {
                send(
                    stream,
                    "206 Partial Content",
                    "content-range: bytes 5-9/10\r\n",
                    5,
                    b"hello",
                )
            }),
            "bytes 5-9/10",
        ),
        (
            Box::new(|_, stream| send(stream, "404 Not Found", "", 0, b"")),
            "check owner",
        ),
        (
            Box::new(|_, stream| send(stream, "403 Forbidden", "", 0, b"")),
            "--hf-token",
        ),
        (
            Box::new(|_, stream| {
                send(
                    stream,
                    "302 Found",
                    "location: /owner/name/resolve/x\r\n",
                    0,
                    b"",
                )
            }),
            "redirects",
        ),
        (
            Box::new(|_, stream| send(stream, "503 Busy", "", 0, b"")),
            "503",
        ),
        (
            Box::new(|_, stream| send(stream, "418 Teapot", "", 0, b"")),
            "418",
        ),
    ];
    for (lie, expected) in lies {
        let server = one_model(&bytes, move |request, stream, _| lie(request, stream));
        let place = place();
        let error = fetch(&server.hub(), &place.cache).unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
        nothing_there(&place.cache);
    }
}

#[test]
fn a_damaged_download_can_be_repeated() {
    let bytes = content(100_000);
    let file = bytes.clone();
    let server = one_model(&bytes, move |request, stream, before| match before {
        0 => send_file(request, stream, &vec![1; 100_000], usize::MAX),
        _ => send_file(request, stream, &file, usize::MAX),
    });
    let place = place();
    assert!(matches!(
        fetch(&server.hub(), &place.cache),
        Err(Error::Damaged { .. })
    ));
    let path = fetch(&server.hub(), &place.cache).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), bytes);
}

#[test]
fn redirects_are_followed_without_the_token() {
    let bytes = content(50_000);
    let file = bytes.clone();
    let store =
        Server::start(move |request, stream, _| send_file(request, stream, &file, usize::MAX));
    // A different host name for the same server.
    let address = store.address.replace("127.0.0.1", "localhost");
    let server = one_model(&bytes, move |_, stream, _| {
        send(
            stream,
            "302 Found",
            &format!("location: {address}/store?key=1\r\n"),
            0,
            b"",
        );
    });
    let place = place();
    let path = fetch(&server.hub(), &place.cache).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), bytes);
    let header = |server: &Server| {
        server.requests.lock().unwrap()[0]
            .header("authorization")
            .map(str::to_owned)
    };
    assert_eq!(header(&server).as_deref(), Some("Bearer secret"));
    assert_eq!(header(&store), None);
}

#[test]
fn listings_are_paginated_and_validated() {
    let server = Server::start(|request, stream, _| {
        describe(request, stream, &[]);
    });
    // A repository without files.
    let listing = server.hub().list(&reference(), "main").unwrap();
    assert_eq!((listing.files.len(), listing.commit.as_str()), (0, COMMIT));
    for revision in ["../x", "/x", ""] {
        server.hub().list(&reference(), revision).unwrap_err();
    }

    let hash = "a".repeat(64);
    let server = Server::start(move |request, stream, _| {
        let page = |path: &str| {
            format!(
                r#"[{{"type":"file","path":"{path}","size":1,"lfs":{{"oid":"{hash}","size":9}}}}]"#
            )
        };
        let host = request.header("host").unwrap();
        let link = format!(
            "link: <http://{host}/api/models/owner/name/tree/x?cursor=2>; rel=\"next\"\r\n"
        );
        match request.path.as_str() {
            path if path.contains("cursor=2") => ok(stream, page("b.gguf").as_bytes()),
            path if path.contains("/tree/") => {
                let body = page("a.gguf");
                send(stream, "200 OK", &link, body.len(), body.as_bytes());
            }
            _ => ok(stream, format!(r#"{{"sha":"{COMMIT}"}}"#).as_bytes()),
        }
    });
    let listing = server.hub().list(&reference(), "main").unwrap();
    let paths: Vec<&str> = listing
        .files
        .iter()
        .map(|file| file.path.as_str())
        .collect();
    assert_eq!(paths, ["a.gguf", "b.gguf"]);

    for (answer, expected) in [
        ("<html>", "not what a hub"),
        (r#"{"sha":"../../x"}"#, "no commit"),
        (r#"{}"#, "not what a hub"),
    ] {
        let server = Server::start(move |_, stream, _| ok(stream, answer.as_bytes()));
        let error = server
            .hub()
            .list(&reference(), "main")
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}");
    }
    // No server listens here.
    let hub = Hub::new(HubOptions {
        endpoint: "http://127.0.0.1:9".to_owned(),
        patience: Duration::from_millis(50),
        attempts: 1,
        ..HubOptions::default()
    });
    assert!(hub.list(&reference(), "main").unwrap_err().is_connection());
}

#[test]
fn concurrent_downloads_fetch_once() {
    let bytes = content(400_000);
    let file = bytes.clone();
    let server = one_model(&bytes, move |request, stream, _| {
        std::thread::sleep(Duration::from_millis(200));
        send_file(request, stream, &file, usize::MAX);
    });
    let place = place();
    let paths = std::thread::scope(|scope| {
        let fetches: Vec<_> = (0..2)
            .map(|_| scope.spawn(|| fetch(&server.hub(), &place.cache).unwrap()))
            .collect();
        fetches
            .into_iter()
            .map(|fetch| fetch.join().unwrap())
            .collect::<Vec<_>>()
    });
    assert_eq!(paths[0], paths[1]);
    assert_eq!(server.count("/resolve/"), 1);
}

#[test]
fn retries_use_the_configured_clock() {
    #[derive(Debug, Default)]
    struct Counting(Mutex<Vec<Duration>>);
    impl Clock for Counting {
        fn now(&self) -> Instant {
            Instant::now()
        }
        fn sleep(&self, time: Duration) {
            self.0.lock().unwrap().push(time);
        }
    }
    let clock = Arc::new(Counting::default());
    let server = Server::start(|_, stream, _| send(stream, "503 Busy", "", 0, b""));
    let hub = Hub::new(HubOptions {
        endpoint: server.address.clone(),
        attempts: 4,
        clock: Arc::clone(&clock) as _,
        ..HubOptions::default()
    });
    hub.list(&reference(), "main").unwrap_err();
    let slept = clock.0.lock().unwrap().clone();
    assert_eq!(slept.len(), 4);
    assert!(slept.is_sorted() && slept[3] > slept[0], "{slept:?}");
}
