//! Messages to a remote-mode server.

use samite_core::Device;
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_remote::RemoteServerOptions;
use samite_remote::bare::{BareServer, BoxedTask, SessionEnvironment, Worker};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio_stream::StreamExt;

/// Rounds in which tasks and requests proceed before the client disconnects.
const ROUNDS: usize = 20;

/// Initial request: a hello of version 1 without a session to resume.
const HELLO: &[u8] = &[0x1a, 2, 8, 1];

/// Tasks and workers of a single-threaded runtime, driven by the test itself.
#[derive(Debug, Default)]
struct OneThread(Mutex<Vec<Worker>>);

impl SessionEnvironment for OneThread {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn sleep(&self, time: Duration) -> BoxedTask {
        Box::pin(tokio::time::sleep(time))
    }

    fn pause(&self, _: Duration) {}

    fn random(&self, bytes: &mut [u8]) -> io::Result<()> {
        bytes.fill(7);
        Ok(())
    }

    fn spawn(&self, task: BoxedTask) {
        tokio::spawn(task);
    }

    fn work(&self, worker: Worker) -> io::Result<()> {
        let mut workers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        workers.push(worker);
        Ok(())
    }
}

impl OneThread {
    fn step(&self) {
        let mut workers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        workers.iter_mut().for_each(Worker::step);
        workers.retain(|worker| !worker.is_over());
    }
}

/// Serves a client that has a token. Each message is two bytes of length and that many bytes. If
/// the first byte is odd, a valid initial request precedes them.
pub fn remote(bytes: &[u8]) {
    let Some((&kind, mut rest)) = bytes.split_first() else {
        return;
    };
    let mut messages = Vec::new();
    if kind & 1 == 1 {
        messages.push(Ok(HELLO.to_vec()));
    }
    while let [low, high, after @ ..] = rest {
        let length = usize::from(u16::from_le_bytes([*low, *high])).min(after.len());
        let (message, after) = after.split_at(length);
        messages.push(Ok(message.to_vec()));
        rest = after;
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let device: Arc<dyn Device> = ReferenceDevice::new(ReferenceOptions {
            host_memory: true,
            ..ReferenceOptions::default()
        });
        let options = RemoteServerOptions {
            store: None,
            memory: Some(1 << 20),
            ..RemoteServerOptions::new("key".into(), "tokens".into())
        };
        let environment = Arc::new(OneThread::default());
        let server = BareServer::new(&[device], options, Arc::clone(&environment) as _);
        let server = server.expect("a server");
        let messages = Box::pin(tokio_stream::iter(messages));
        if let Ok(mut replies) = server.serve("owner", messages).await {
            for _ in 0..ROUNDS {
                tokio::task::yield_now().await;
                environment.step();
                let wait = tokio::time::timeout(Duration::ZERO, replies.next());
                let _ = wait.await;
            }
        }
    });
}
