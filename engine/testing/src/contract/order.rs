//! Order of work in a stream, and its cancellation.

use super::bench::{Bench, Check, N, Named, control, ensure, pattern};
use samite_core::{CancelToken, Error};

pub(super) const CHECKS: &[Named] = &[
    ("work is done in order", work_is_done_in_order),
    ("cancellation", cancellation),
];

fn work_is_done_in_order(bench: &Bench) -> Check {
    let work = bench.work()?;
    let mut stream = bench.stream()?;
    let mut prepared = stream.prepare(work.placed())?;
    let (x, y) = (work.place(work.x), work.place(work.y));
    let cancel = CancelToken::new();
    // Everything is queued before the first wait.
    stream.write(x, 0, &pattern(4))?;
    stream.run(&mut *prepared, control(&cancel))?;
    stream.write(x, 0, &pattern(5))?;
    stream.run(&mut *prepared, control(&cancel))?;
    stream.write(x, 0, &pattern(6))?;
    let (mut result, mut input) = (vec![0; N * N * 4], vec![0; N * N * 4]);
    stream.read(y, 0, &mut result)?;
    stream.read(x, 0, &mut input)?;
    stream.synchronize()?;
    ensure(
        result == bench.result_of(&pattern(5))?,
        "the result is not that of the input written before",
    )?;
    ensure(input == pattern(6), "a write behind a run is lost")
}

fn cancellation(bench: &Bench) -> Check {
    let work = bench.work()?;
    let mut stream = bench.stream()?;
    let mut prepared = stream.prepare(work.placed())?;
    let cancel = CancelToken::new();
    cancel.cancel();
    let issued = stream.run(&mut *prepared, control(&cancel));
    let done = stream.synchronize();
    ensure(
        matches!(issued.and(done), Err(Error::Cancelled)),
        "a cancelled run does not say so",
    )?;
    cancel.reset();
    stream.run(&mut *prepared, control(&cancel))?;
    Ok(stream.synchronize()?)
}
