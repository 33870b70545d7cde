//! Worker threads, one for each member but the first, which runs on the caller's thread.

use samite_core::{Error, Result};
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// A job that every member runs.
pub(crate) type ShardJob = Arc<dyn Fn(usize) -> Result<()> + Send + Sync>;

enum Post {
    Nothing,
    Job(ShardJob),
    Result(Result<()>),
    End,
}

/// Passes a job to a thread and its result back.
struct Mailbox {
    post: Mutex<Post>,
    changed: Condvar,
    /// Number of changes of `post`. Spinning threads watch it.
    count: AtomicUsize,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Post> {
        self.post.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, post: Post) {
        *self.lock() = post;
        self.count.fetch_add(1, Ordering::Release);
        self.changed.notify_all();
    }

    /// Waits until `take` accepts the post: first spins, then sleeps. Returns `None` at the
    /// deadline.
    fn wait<T>(
        &self,
        spins: usize,
        deadline: Option<Duration>,
        take: impl Fn(&mut Post) -> Option<T>,
    ) -> Option<T> {
        let mut seen = self.count.load(Ordering::Acquire);
        if let Some(taken) = take(&mut self.lock()) {
            return Some(taken);
        }
        for _ in 0..spins {
            let now = self.count.load(Ordering::Acquire);
            if now != seen {
                seen = now;
                if let Some(taken) = take(&mut self.lock()) {
                    return Some(taken);
                }
            }
            spin_loop();
        }
        let mut post = self.lock();
        loop {
            if let Some(taken) = take(&mut post) {
                return Some(taken);
            }
            post = match deadline {
                None => self
                    .changed
                    .wait(post)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let (woken, timeout) = self
                        .changed
                        .wait_timeout(post, deadline)
                        .unwrap_or_else(PoisonError::into_inner);
                    post = woken;
                    if timeout.timed_out() {
                        return take(&mut post);
                    }
                    post
                }
            };
        }
    }
}

/// Worker threads of all members but the first.
pub(crate) struct ShardWorkers {
    mailboxes: Vec<Arc<Mailbox>>,
    threads: Vec<JoinHandle<()>>,
    spins: usize,
    deadline: Duration,
    /// Set if a thread did not return in time.
    is_lost: bool,
}

/// Runs a job. Turns a panic into an error.
fn done(job: &ShardJob, member: usize) -> Result<()> {
    catch_unwind(AssertUnwindSafe(|| job(member))).unwrap_or_else(|panic| {
        let what = panic
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_default();
        Err(Error::device(
            "meta",
            format!("member {member} panicked: {what}"),
        ))
    })
}

impl ShardWorkers {
    /// Starts threads for `members` members. A waiting thread spins `spins` times before it sleeps.
    pub fn new(name: &str, members: usize, spins: usize, deadline: Duration) -> Result<Self> {
        let mut shard_workers = ShardWorkers {
            mailboxes: Vec::new(),
            threads: Vec::new(),
            spins,
            deadline,
            is_lost: false,
        };
        for member in 1..members {
            let mailbox = Arc::new(Mailbox {
                post: Mutex::new(Post::Nothing),
                changed: Condvar::new(),
                count: AtomicUsize::new(0),
            });
            let mine = Arc::clone(&mailbox);
            let work = move || {
                loop {
                    let next = mine.wait(spins, None, |post| match post {
                        Post::Job(_) | Post::End => Some(std::mem::replace(post, Post::Nothing)),
                        Post::Nothing | Post::Result(_) => None,
                    });
                    let Some(Post::Job(job)) = next else { return };
                    let result = done(&job, member);
                    // Release everything that the job holds before posting the result.
                    drop(job);
                    mine.put(Post::Result(result));
                }
            };
            let thread = samite_core::thread_builder()
                .and_then(|thread| thread.name(format!("{name}-{member}")).spawn(work))
                .map_err(|error| Error::io("starting a thread of a member", error))?;
            shard_workers.mailboxes.push(mailbox);
            shard_workers.threads.push(thread);
        }
        Ok(shard_workers)
    }

    /// Returns whether a thread did not return in time.
    pub fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Runs a job on every member and waits for all. Returns the result of each member, or `None`
    /// for one that did not return in time; the threads are then lost.
    pub fn run(&mut self, job: &ShardJob) -> Vec<Option<Result<()>>> {
        for mailbox in &self.mailboxes {
            mailbox.put(Post::Job(Arc::clone(job)));
        }
        let mut results = vec![Some(done(job, 0))];
        for mailbox in &self.mailboxes {
            let result = mailbox.wait(self.spins, Some(self.deadline), |post| match post {
                Post::Result(_) => match std::mem::replace(post, Post::Nothing) {
                    Post::Result(result) => Some(result),
                    _ => None,
                },
                _ => None,
            });
            self.is_lost |= result.is_none();
            results.push(result);
        }
        results
    }
}

impl Drop for ShardWorkers {
    fn drop(&mut self) {
        for mailbox in &self.mailboxes {
            mailbox.put(Post::End);
        }
        // Do not wait for a thread that did not return.
        if !self.is_lost {
            for thread in self.threads.drain(..) {
                let _ = thread.join();
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_worker_runs_once_and_a_panic_is_an_error() {
        for spins in [0, 1000] {
            let mut shard_workers =
                ShardWorkers::new("test", 3, spins, Duration::from_secs(60)).unwrap();
            for round in 0..200 {
                let worked = Arc::new(AtomicUsize::new(0));
                let count = Arc::clone(&worked);
                let job: ShardJob = Arc::new(move |member| {
                    count.fetch_add(1 << (8 * member), Ordering::Relaxed);
                    assert!(member != 2 || round != 7, "on purpose");
                    Ok(())
                });
                let results = shard_workers.run(&job);
                assert_eq!(worked.load(Ordering::Relaxed), 0x01_01_01);
                let failed = results
                    .iter()
                    .filter(|r| !matches!(r, Some(Ok(()))))
                    .count();
                assert_eq!(failed, usize::from(round == 7));
                if round == 7 {
                    let error = results[2].as_ref().unwrap().as_ref().unwrap_err();
                    assert!(error.to_string().contains("on purpose"), "{error}");
                }
            }
        }
    }

    #[test]
    fn a_hanging_worker_is_abandoned_at_the_deadline() {
        let mut shard_workers = ShardWorkers::new("test", 2, 0, Duration::from_millis(30)).unwrap();
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        let receiver = Mutex::new(receiver);
        let job: ShardJob = Arc::new(move |member| {
            if member == 1 {
                let _ = receiver.lock().unwrap().recv();
            }
            Ok(())
        });
        let results = shard_workers.run(&job);
        assert!(results[1].is_none() && shard_workers.is_lost());
        drop(sender);
    }
}
