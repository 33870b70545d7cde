//! Events between streams and the host, and times of nodes.

use super::bench::{Bench, Check, End, N, Named, control, ensure, pattern, read, skip};
use samite_core::{CancelToken, Event, Result, RunControl, RunObserver, TensorId};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub(super) const CHECKS: &[Named] = &[("events", events), ("node times", node_times)];

fn events(bench: &Bench) -> Check {
    if !bench.device.capabilities().events {
        let made = bench.device.create_event();
        ensure(made.is_err(), "it makes events and says that it cannot")?;
        return skip("it has no events");
    }
    let event = bench.device.create_event()?;
    event.synchronize()?; // nothing was recorded
    let (work, mut first, mut second) = (bench.work()?, bench.stream()?, bench.stream()?);
    let mut prepared = first.prepare(work.placed())?;
    for seed in 0..4 {
        first.write(work.place(work.x), 0, &pattern(seed))?;
        first.run(&mut *prepared, control(&CancelToken::new()))?;
        first.record(&*event)?;
        // The host waits in every other round, and another stream in the rest.
        if seed % 2 == 0 {
            event.synchronize()?;
            ensure(
                read(work.place(work.y))? == bench.result_of(&pattern(seed))?,
                "the host did not wait for the event",
            )?;
        } else {
            second.wait(&*event)?;
            let mut out = vec![0; N * N * 4];
            second.read(work.place(work.y), 0, &mut out)?;
            ensure(
                out == bench.result_of(&pattern(seed))?,
                "a stream did not wait for another's event",
            )?;
        }
    }
    struct Foreign;
    impl fmt::Debug for Foreign {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Foreign")
        }
    }
    impl Event for Foreign {
        fn synchronize(&self) -> Result<()> {
            Ok(())
        }
        fn as_any(&self) -> &dyn std::any::Any {
            self
        }
    }
    ensure(
        first.record(&Foreign).is_err(),
        "recording in another device's event is no error",
    )?;
    first.synchronize()?;
    Ok(second.synchronize()?)
}

fn node_times(bench: &Bench) -> Check {
    #[derive(Default)]
    struct Seen(Mutex<Vec<TensorId>>);
    impl RunObserver for Seen {
        fn ran(&self, node: TensorId, _: Duration, _: Duration) {
            let seen = self.0.lock();
            seen.unwrap_or_else(PoisonError::into_inner).push(node);
        }
    }
    let work = bench.work()?;
    let mut stream = bench.stream()?;
    let mut prepared = stream.prepare(work.placed())?;
    let seen = Arc::new(Seen::default());
    let observer: Arc<dyn RunObserver> = Arc::clone(&seen) as _;
    let control = RunControl {
        cancel: &CancelToken::new(),
        observer: Some(&observer),
    };
    stream.run(&mut *prepared, control)?;
    stream.synchronize()?;
    let seen = seen.0.lock().unwrap_or_else(PoisonError::into_inner);
    match &seen[..] {
        [] => skip("it does not time nodes"),
        [node] if *node == work.y => Ok(()),
        others => Err(End::Fail(format!("it told of {others:?}"))),
    }
}
