//! A thread that drives an engine, and how others reach it.

use crate::engine::{Engine, Step};
use crate::outbox::{Bell, Outbox, Reader, outbox};
use crate::request::{Limits, Prepared, Refusal, Request};
use crate::view::View;
use samite_text::Tokenizer;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

enum Command {
    Submit(Box<(Prepared, Outbox)>),
    Call(Box<dyn FnOnce(&mut Engine) + Send>),
}

#[derive(Default)]
struct Inbox {
    commands: Vec<Command>,
    /// Requests among the commands, and those that wait in the engine.
    waiting: usize,
    /// A reader made room or is gone.
    is_rung: bool,
    is_closing: bool,
    must_end: bool,
    /// The thread is gone.
    is_over: bool,
}

struct Shared {
    inbox: Mutex<Inbox>,
    changed: Condvar,
    view: Mutex<Arc<View>>,
    limits: Limits,
    tokenizer: Arc<Tokenizer>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reaches an engine that a thread drives. Clones reach the same one.
#[derive(Clone)]
pub struct Handle(Arc<Shared>);

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle")
            .field("limits", &self.0.limits)
            .finish_non_exhaustive()
    }
}

/// Starts a thread that drives `engine` until it is told to [end](Handle::end) or [drained](Handle::close), and everything is answered.
///
/// # Errors
/// If the system gives no thread.
pub fn drive(engine: Engine) -> std::io::Result<(Handle, JoinHandle<()>)> {
    let shared = Arc::new(Shared {
        inbox: Mutex::default(),
        changed: Condvar::new(),
        view: Mutex::new(Arc::new(engine.view())),
        limits: engine.limits(),
        tokenizer: Arc::clone(engine.tokenizer()),
    });
    let handle = Handle(Arc::clone(&shared));
    let thread = std::thread::Builder::new()
        .name("requests".to_owned())
        .spawn(move || {
            let over = Over(shared);
            run(engine, &over.0);
        })?;
    Ok((handle, thread))
}

/// Tells those who wait that nobody will answer, whatever ends the thread.
struct Over(Arc<Shared>);

impl Drop for Over {
    fn drop(&mut self) {
        let mut inbox = self.0.lock();
        inbox.is_over = true;
        inbox.commands.clear();
    }
}

fn run(mut engine: Engine, shared: &Shared) {
    loop {
        let (commands, is_closing, must_end) = {
            let mut inbox = shared.lock();
            inbox.is_rung = false;
            (
                std::mem::take(&mut inbox.commands),
                inbox.is_closing,
                inbox.must_end,
            )
        };
        for command in commands {
            match command {
                Command::Submit(submitted) => {
                    let (prepared, outbox) = *submitted;
                    // Whether it is taken was found out before.
                    if let Err(refusal) = engine.enqueue(prepared, outbox) {
                        tracing::debug!(%refusal, "a request came too late");
                    }
                }
                Command::Call(call) => call(&mut engine),
            }
        }
        if is_closing {
            engine.close();
        }
        if must_end {
            engine.end_all();
        }
        let step = engine.step();
        let view = engine.view();
        shared.lock().waiting = view.queued;
        *shared.view.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(view);
        if let Step::Idle(until) = step {
            if is_closing && engine.is_quiet() {
                return;
            }
            wait(shared, until, &engine);
        }
    }
}

/// Waits until there is something to do.
fn wait(shared: &Shared, until: Option<Instant>, engine: &Engine) {
    let mut inbox = shared.lock();
    let before = (inbox.is_closing, inbox.must_end);
    while inbox.commands.is_empty()
        && !inbox.is_rung
        && (inbox.is_closing, inbox.must_end) == before
    {
        let Some(until) = until else {
            let waited = shared.changed.wait(inbox);
            inbox = waited.unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        let now = engine.context().options().environment.clock.now();
        let Some(time) = until
            .checked_duration_since(now)
            .filter(|time| !time.is_zero())
        else {
            return;
        };
        let waited = shared.changed.wait_timeout(inbox, time);
        inbox = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
}

impl Handle {
    /// What no request may pass.
    pub fn limits(&self) -> Limits {
        self.0.limits
    }

    fn bell(&self) -> Bell {
        let shared = Arc::downgrade(&self.0);
        Arc::new(move || {
            if let Some(shared) = shared.upgrade() {
                shared.lock().is_rung = true;
                shared.changed.notify_all();
            }
        })
    }

    /// Checks a request and hands it over. Everything that is wrong with it is said now.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn submit(&self, request: Request) -> Result<Reader, Refusal> {
        let prepared = Prepared::new(request, &self.0.limits, &self.0.tokenizer)?;
        let (outbox, reader) = outbox(prepared.request.outbox, self.bell());
        let mut inbox = self.0.lock();
        if inbox.is_closing || inbox.is_over {
            return Err(Refusal::Closing);
        }
        if inbox.waiting >= self.0.limits.queue {
            return Err(Refusal::QueueFull(inbox.waiting));
        }
        inbox.waiting += 1;
        inbox
            .commands
            .push(Command::Submit(Box::new((prepared, outbox))));
        drop(inbox);
        self.0.changed.notify_all();
        Ok(reader)
    }

    /// Has the engine's thread do something between two steps. It is dropped, and not called, if the thread is gone.
    pub fn call(&self, call: impl FnOnce(&mut Engine) + Send + 'static) {
        let mut inbox = self.0.lock();
        if !inbox.is_over {
            inbox.commands.push(Command::Call(Box::new(call)));
        }
        drop(inbox);
        self.0.changed.notify_all();
    }

    /// The engine as it was after its last step.
    pub fn view(&self) -> Arc<View> {
        let view = self.0.view.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&view)
    }

    /// Whether the thread is gone.
    pub fn is_over(&self) -> bool {
        self.0.lock().is_over
    }

    /// Takes no more requests, and ends when those that are there are answered.
    pub fn close(&self) {
        self.0.lock().is_closing = true;
        self.0.changed.notify_all();
    }

    /// Ends all requests.
    pub fn end(&self) {
        let mut inbox = self.0.lock();
        inbox.is_closing = true;
        inbox.must_end = true;
        drop(inbox);
        self.0.changed.notify_all();
    }
}
