//! A thread that drives an engine, and the handle through which other threads reach it.

use crate::engine::{Engine, Step};
use crate::event::FailureKind;
use crate::event_queue::{EngineWaker, EventQueue, Reader, event_queue};
use crate::request::{Limits, Prepared, Refusal, Request};
use crate::view::{Totals, View};
use samite_core::environment::Clock;
use samite_llm::Result;
use samite_text::Tokenizer;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

enum Command {
    Submit(Box<(Prepared, EventQueue)>),
    Call(Box<dyn FnOnce(&mut Engine) + Send>),
}

#[derive(Default)]
struct Inbox {
    commands: Vec<Command>,
    /// Number of waiting requests by owner: those among the commands, and those in the engine's
    /// queue.
    waiting: BTreeMap<u64, usize>,
    /// A reader made room or was dropped.
    is_rung: bool,
    is_closing: bool,
    must_end: bool,
    /// The thread has ended.
    is_over: bool,
    /// The thread ended because a device is lost.
    is_lost: bool,
}

impl Inbox {
    /// Counts the waiting requests: those in the engine's queue, and those that it has not seen
    /// yet.
    fn count_waiting(&mut self, queued: BTreeMap<u64, usize>) {
        self.waiting = queued;
        for command in &self.commands {
            if let Command::Submit(submitted) = command {
                *self.waiting.entry(submitted.0.request.owner).or_default() += 1;
            }
        }
    }
}

struct DriverState {
    inbox: Mutex<Inbox>,
    changed: Condvar,
    view: Mutex<Arc<View>>,
    limits: Limits,
    tokenizer: Arc<Tokenizer>,
}

impl DriverState {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn show(&self, view: View) {
        *self.view.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(view);
    }

    fn view(&self) -> Arc<View> {
        let view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&view)
    }
}

/// Handle to an engine that a thread drives. Clones refer to the same engine.
#[derive(Clone)]
pub struct Handle(Arc<DriverState>);

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle")
            .field("limits", &self.0.limits)
            .finish_non_exhaustive()
    }
}

/// Starts a thread that drives `engine`. It ends after [`end`](Handle::end) or
/// [`close`](Handle::close), once every request is answered.
///
/// # Errors
/// Returns an error if the system cannot create a thread.
pub fn drive(engine: Engine) -> std::io::Result<(Handle, JoinHandle<()>)> {
    start(engine, None)
}

/// Drives an engine like [`drive`], but drops the engine and its context after `quiet` without a
/// request, which frees their memory. The next command calls `make` to create another engine.
///
/// # Errors
/// Returns an error if the system cannot create a thread.
pub fn drive_sleeping(
    engine: Engine,
    quiet: Duration,
    make: impl FnMut() -> Result<Engine> + Send + 'static,
) -> std::io::Result<(Handle, JoinHandle<()>)> {
    start(engine, Some((quiet, Box::new(make))))
}

/// Idle time after which the engine is dropped, and the function that recreates it.
type Sleep = Option<(Duration, Box<dyn FnMut() -> Result<Engine> + Send>)>;

fn start(mut engine: Engine, sleep: Sleep) -> std::io::Result<(Handle, JoinHandle<()>)> {
    engine.start_image_thread()?;
    let shared = Arc::new(DriverState {
        inbox: Mutex::default(),
        changed: Condvar::new(),
        view: Mutex::new(Arc::new(engine.view())),
        limits: engine.limits(),
        tokenizer: Arc::clone(engine.tokenizer()),
    });
    let handle = Handle(Arc::clone(&shared));
    let thread = samite_core::thread_builder()?
        .name("requests".to_owned())
        .spawn(move || {
            let over = Over(shared);
            run(engine, sleep, &over.0);
        })?;
    Ok((handle, thread))
}

/// Guard that marks the thread as ended, however it ends, so that waiting callers get no answer
/// instead of waiting forever.
struct Over(Arc<DriverState>);

impl Drop for Over {
    fn drop(&mut self) {
        let mut inbox = self.0.lock();
        inbox.is_over = true;
        inbox.commands.clear();
    }
}

fn run(engine: Engine, mut sleep: Sleep, shared: &DriverState) {
    let clock = Arc::clone(&engine.context().options().environment.clock);
    let mut awake = Some(engine);
    let mut totals = Totals::default();
    let mut busy_at = clock.now();
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
        if awake.is_none() && !commands.is_empty() {
            match sleep.as_mut().map(|(_, make)| make()) {
                Some(Ok(mut engine)) => {
                    engine.set_totals(totals);
                    if let Err(error) = engine.start_image_thread() {
                        tracing::warn!(%error, "images are encoded between other steps");
                    }
                    awake = Some(engine);
                }
                Some(Err(error)) => tracing::error!(%error, "the engine cannot be made again"),
                None => {}
            }
        }
        let Some(engine) = &mut awake else {
            // Dropping the commands tells their waiting callers that they are not executed.
            drop(commands);
            if is_closing || must_end {
                return;
            }
            let mut inbox = shared.lock();
            inbox.count_waiting(BTreeMap::new());
            drop(inbox);
            wait(shared, (is_closing, must_end), None, &*clock);
            continue;
        };
        if !commands.is_empty() {
            busy_at = clock.now();
        }
        for command in commands {
            match command {
                Command::Submit(submitted) => {
                    let (prepared, event_queue) = *submitted;
                    // Submission already checked whether it can be accepted.
                    if let Err(refusal) = engine.enqueue(prepared, event_queue) {
                        tracing::debug!(%refusal, "a request came too late");
                    }
                }
                Command::Call(call) => call(engine),
            }
        }
        if is_closing {
            engine.close();
        }
        if must_end {
            engine.end_all();
        }
        let step = engine.step_then(|engine| {
            let view = engine.view();
            totals = view.totals;
            shared.lock().count_waiting(view.queued.clone());
            shared.show(view);
        });
        if engine.is_lost() {
            engine.fail_all(FailureKind::Device, "a device is lost");
            shared.show(engine.view());
            shared.lock().is_lost = true;
            return;
        }
        let Step::Idle(until) = step else {
            busy_at = clock.now();
            continue;
        };
        if is_closing && engine.is_quiet() {
            return;
        }
        let quiet = sleep.as_ref().filter(|_| engine.is_quiet());
        let tired_at = quiet.and_then(|(quiet, _)| busy_at.checked_add(*quiet));
        if tired_at.is_some_and(|at| at <= clock.now()) {
            shared.show(View {
                is_sleeping: true,
                ..View::clone(&shared.view())
            });
            awake = None;
            continue;
        }
        let until = until.into_iter().chain(tired_at).min();
        wait(shared, (is_closing, must_end), until, &*clock);
    }
}

/// Waits until there is something to do. `known` are the values of `is_closing` and `must_end` that
/// the thread saw last, which may be outdated.
fn wait(shared: &DriverState, known: (bool, bool), until: Option<Instant>, clock: &dyn Clock) {
    let mut inbox = shared.lock();
    while inbox.commands.is_empty() && !inbox.is_rung && (inbox.is_closing, inbox.must_end) == known
    {
        let Some(until) = until else {
            let waited = shared.changed.wait(inbox);
            inbox = waited.unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        let time = until.checked_duration_since(clock.now());
        let Some(time) = time.filter(|time| !time.is_zero()) else {
            return;
        };
        let waited = shared.changed.wait_timeout(inbox, time);
        inbox = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
}

impl Handle {
    /// Returns the limits of a request.
    pub fn limits(&self) -> Limits {
        self.0.limits
    }

    fn wake_engine(&self) -> EngineWaker {
        let shared = Arc::downgrade(&self.0);
        Arc::new(move || {
            if let Some(shared) = shared.upgrade() {
                shared.lock().is_rung = true;
                shared.changed.notify_all();
            }
        })
    }

    /// Checks a request and submits it. All problems of the request are reported here.
    ///
    /// # Errors
    /// Returns the reason why it is rejected.
    pub fn submit(&self, request: Request) -> Result<Reader, Refusal> {
        let prepared = Prepared::new(request, &self.0.limits, &self.0.tokenizer)?;
        let (event_queue, reader) = event_queue(prepared.request.event_queue, self.wake_engine());
        let mut inbox = self.0.lock();
        if inbox.is_closing || inbox.is_over {
            return Err(Refusal::Closing);
        }
        let waiting = inbox.waiting.entry(prepared.request.owner).or_default();
        if *waiting >= self.0.limits.queue {
            return Err(Refusal::QueueFull(*waiting));
        }
        *waiting += 1;
        inbox
            .commands
            .push(Command::Submit(Box::new((prepared, event_queue))));
        drop(inbox);
        self.0.changed.notify_all();
        Ok(reader)
    }

    /// Calls a function on the engine's thread between two steps. The function is dropped without a
    /// call if the thread has ended.
    pub fn call(&self, call: impl FnOnce(&mut Engine) + Send + 'static) {
        let mut inbox = self.0.lock();
        if !inbox.is_over {
            inbox.commands.push(Command::Call(Box::new(call)));
        }
        drop(inbox);
        self.0.changed.notify_all();
    }

    /// Returns the state of the engine after its last step.
    pub fn view(&self) -> Arc<View> {
        self.0.view()
    }

    /// Recreates a [sleeping](drive_sleeping) engine.
    pub fn wake(&self) {
        let view = self.view();
        if view.is_sleeping {
            self.0.show(View {
                is_sleeping: false,
                ..View::clone(&view)
            });
            self.call(|_| {});
        }
    }

    /// Returns whether the thread has ended.
    pub fn is_over(&self) -> bool {
        self.0.lock().is_over
    }

    /// Returns whether the thread has ended because a device is lost.
    pub fn is_lost(&self) -> bool {
        self.0.lock().is_lost
    }

    /// Stops accepting requests, and ends the thread when the existing ones are answered.
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
