//! Files of the web, from a server on the loopback.

#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_hub::{WebClient, WebHosts};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;

/// Starts a server that answers each path: `/N` with N bytes, `/to/N` with a redirect to `/N`, and
/// others with 404. Returns its URL.
fn server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
            while line.trim_end() != "" {
                line.clear();
                reader.read_line(&mut line).unwrap();
            }
            let count = path.trim_start_matches('/').parse::<usize>();
            let (status, header, body) = match (count, path.strip_prefix("/to/")) {
                (Ok(count), _) => ("200 OK", String::new(), vec![7; count]),
                (_, Some(to)) => ("302 Found", format!("Location: /{to}\r\n"), Vec::new()),
                _ => ("404 Not Found", String::new(), Vec::new()),
            };
            let length = body.len();
            let head = format!(
                "HTTP/1.1 {status}\r\n{header}Content-Length: {length}\r\nConnection: close\r\n\r\n"
            );
            let answer = [head.into_bytes(), body].concat();
            // A client that has enough closes the connection.
            let _ = stream.write_all(&answer);
        }
    });
    url
}

#[test]
fn files_are_fetched_within_limits() {
    let url = server();
    let client = WebClient::new(WebHosts::All, 1000);
    let fetch = |path: &str| client.fetch(&format!("{url}{path}"));
    assert_eq!(fetch("/1000"), Ok(vec![7; 1000]));
    assert_eq!(fetch("/to/20"), Ok(vec![7; 20]));
    assert!(fetch("/1001").unwrap_err().contains("more than 1000 bytes"));
    assert!(fetch("/other").unwrap_err().contains("404"));
    assert!(fetch("/to/to/to/to/to/1").is_err());
    for url in [
        "file:///etc/passwd",
        "ftp://127.0.0.1/a",
        "http://",
        "nothing",
    ] {
        assert!(client.fetch(url).is_err(), "{url}");
    }
}

#[test]
fn private_hosts_are_refused() {
    let url = server();
    let port = url.rsplit(':').next().unwrap();
    let client = WebClient::new(WebHosts::Public, 1000);
    for host in [
        "127.0.0.1",
        "localhost",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "0.0.0.0",
        "169.254.169.254",
    ] {
        let error = client
            .fetch(&format!("http://{host}:{port}/9"))
            .unwrap_err();
        assert!(error.contains("private address"), "{host}: {error}");
    }
}
