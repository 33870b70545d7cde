//! The conformance suite of the contract itself: buffers, streams, events, copies, import, faults, order, cancellation.
//!
//! What a device computes is a matter of [`run_suite`](crate::run_suite). Here, one simple operation that the device supports is enough. Every check
//! uses the device through the contract only, so that it holds for any.

use samite_core::{
    Buffer, BufferType, CancelToken, DType, Device, Error, Event, Graph, HostMemory, Layout, Op,
    Placed, Result, Rows, RunControl, RunObserver, Slot, StoredTensor, Stream, TensorGroup,
    TensorId, TensorInfo, TensorRef, Usage, host_buffer, host_buffer_type,
};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// What came of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContractOutcome {
    /// It holds.
    Passed,
    /// The device has nothing that the check is about.
    Skipped(String),
    /// It does not hold.
    Failed(String),
}

/// Outcomes by name of the check.
#[derive(Clone, Debug, Default)]
pub struct ContractReport {
    /// In the order in which they were made.
    pub checks: Vec<(&'static str, ContractOutcome)>,
}

impl ContractReport {
    /// The checks that do not hold, with what is wrong.
    pub fn failures(&self) -> Vec<(&'static str, &str)> {
        let failed = self
            .checks
            .iter()
            .filter_map(|(name, outcome)| match outcome {
                ContractOutcome::Failed(why) => Some((*name, why.as_str())),
                _ => None,
            });
        failed.collect()
    }

    /// How many checks hold.
    pub fn passed(&self) -> usize {
        let passed = |(_, outcome): &&(_, _)| *outcome == ContractOutcome::Passed;
        self.checks.iter().filter(passed).count()
    }
}

impl fmt::Display for ContractReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, outcome) in &self.checks {
            match outcome {
                ContractOutcome::Passed => writeln!(f, "{name}: holds")?,
                ContractOutcome::Skipped(why) => writeln!(f, "{name}: skipped, {why}")?,
                ContractOutcome::Failed(why) => writeln!(f, "{name}: FAILED: {why}")?,
            }
        }
        Ok(())
    }
}

/// Why a check ends early.
enum End {
    Skip(String),
    Fail(String),
}

impl From<Error> for End {
    fn from(error: Error) -> Self {
        End::Fail(error.to_string())
    }
}

type Check = Result<(), End>;

/// A check with what it is called.
type Named = (&'static str, fn(&Bench) -> Check);

fn ensure(holds: bool, otherwise: impl fmt::Display) -> Check {
    match holds {
        true => Ok(()),
        false => Err(End::Fail(otherwise.to_string())),
    }
}

fn skip<T>(why: &str) -> Result<T, End> {
    Err(End::Skip(why.into()))
}

/// Checks that `device` keeps the contract of [`samite_core::device`].
pub fn check_contract(device: &Arc<dyn Device>) -> ContractReport {
    let checks: &[Named] = &[
        ("buffers hold what is written", buffers_hold_what_is_written),
        ("accesses are checked", accesses_are_checked),
        ("locations", locations),
        ("sizes in bulk", sizes_in_bulk),
        ("answers in bulk", answers_in_bulk),
        ("too much memory", too_much_memory),
        ("copies between memories", copies_between_memories),
        ("work is done in order", work_is_done_in_order),
        ("prepared work runs again", prepared_work_runs_again),
        ("compiled work is shared", compiled_work_is_shared),
        ("cancellation", cancellation),
        ("node times", node_times),
        ("foreign work", foreign_work),
        ("overlapping places", overlapping_places),
        ("streams copy", streams_copy),
        ("events", events),
        ("import", import),
        ("pinned memory", pinned_memory),
    ];
    let bench = Bench {
        device: Arc::clone(device),
    };
    let outcome = |check: fn(&Bench) -> Check| match check(&bench) {
        Ok(()) => ContractOutcome::Passed,
        Err(End::Skip(why)) => ContractOutcome::Skipped(why),
        Err(End::Fail(why)) => ContractOutcome::Failed(why),
    };
    ContractReport {
        checks: checks
            .iter()
            .map(|&(name, check)| (name, outcome(check)))
            .collect(),
    }
}

/// Elements of the tensors that checks work on: products of this extent are worth it for any device.
const N: usize = 64;

struct Bench {
    device: Arc<dyn Device>,
}

/// A graph of one node with places in a device's memory.
struct Work {
    graph: Graph,
    nodes: Vec<TensorId>,
    places: Vec<Option<TensorRef>>,
    workspace: Option<TensorRef>,
    x: TensorId,
    y: TensorId,
}

impl Work {
    fn placed(&self) -> Placed<'_> {
        Placed {
            graph: &self.graph,
            nodes: &self.nodes,
            places: &self.places,
            workspace: self.workspace.as_ref(),
            compiled: None,
        }
    }

    fn place(&self, id: TensorId) -> &TensorRef {
        match &self.places[id.index()] {
            Some(place) => place,
            None => unreachable!("every tensor was given a place"),
        }
    }
}

fn matrix() -> Result<Layout> {
    Layout::contiguous(DType::F32, [N, N, 1, 1])
}

fn pattern(seed: u8) -> Vec<u8> {
    let value = |i: usize| ((i * 7 + usize::from(seed) * 13) % 19) as f32 - 9.0;
    (0..N * N).flat_map(|i| value(i).to_le_bytes()).collect()
}

fn read(place: &TensorRef) -> Result<Vec<u8>> {
    let mut bytes = vec![0; place.layout().bytes()];
    place.read(0, &mut bytes)?;
    Ok(bytes)
}

/// Runs without a watcher.
fn control(cancel: &CancelToken) -> RunControl<'_> {
    RunControl {
        cancel,
        observer: None,
    }
}

impl Bench {
    fn stream(&self) -> Result<Box<dyn Stream>> {
        Arc::clone(&self.device).open_stream()
    }

    fn tensor(&self, memory: &Arc<dyn BufferType>) -> Result<TensorRef> {
        let group = TensorGroup::allocate(memory, Usage::Any, &[("t", matrix()?)])?;
        Ok(group.tensors[0].tensor().clone())
    }

    /// A product or a scaling, whichever the device supports: `y = x x^T` or `y = 2 x`.
    fn work(&self) -> Result<Work, End> {
        for product in [false, true] {
            let mut graph = Graph::new();
            let x = graph.input("x", DType::F32, [N, N, 1, 1])?;
            let y = match product {
                false => graph.scale(x, 2.0)?,
                true => graph.mul_mat(x, x)?,
            };
            graph.set_output(y);
            if !self.device.supports(graph.node(y)).is_yes() {
                continue;
            }
            let memory = self.device.buffer_type();
            let nodes = vec![y];
            let bytes = self.device.workspace(&graph, &nodes)?;
            let workspace = match bytes {
                0 => None,
                _ => {
                    let layout = Layout::contiguous(DType::I8, [bytes, 1, 1, 1])?;
                    let group =
                        TensorGroup::allocate(&memory, Usage::Compute, &[("workspace", layout)])?;
                    Some(group.tensors[0].tensor().clone())
                }
            };
            let places = vec![Some(self.tensor(&memory)?), Some(self.tensor(&memory)?)];
            return Ok(Work {
                graph,
                nodes,
                places,
                workspace,
                x,
                y,
            });
        }
        skip("it supports neither scaling nor products of F32 matrices")
    }

    /// What the device makes of an input.
    fn result_of(&self, input: &[u8]) -> Result<Vec<u8>, End> {
        let work = self.work()?;
        let mut stream = self.stream()?;
        let mut prepared = stream.prepare(work.placed())?;
        stream.write(work.place(work.x), 0, input)?;
        stream.run(&mut *prepared, control(&CancelToken::new()))?;
        let mut out = vec![0; input.len()];
        stream.read(work.place(work.y), 0, &mut out)?;
        Ok(out)
    }
}

fn buffers_hold_what_is_written(bench: &Bench) -> Check {
    let memory = bench.device.buffer_type();
    let alignment = memory.alignment();
    ensure(
        alignment.is_power_of_two(),
        "the alignment is no power of two",
    )?;
    let tensor = bench.tensor(&memory)?;
    ensure(
        read(&tensor)?.iter().all(|&byte| byte == 0),
        "new memory is not zeroed",
    )?;
    let mut expected = pattern(1);
    tensor.write(0, &expected)?;
    ensure(read(&tensor)? == expected, "reading gives something else")?;
    tensor.write(5, &[1, 2, 3])?;
    expected[5..8].copy_from_slice(&[1, 2, 3]);
    tensor.buffer.fill(tensor.slot, 101, 50, 9)?;
    expected[101..151].fill(9);
    let rows = Rows {
        offset: 300,
        len: 8,
        count: 3,
        stride: 256,
        host_stride: 16,
    };
    tensor.write_rows(rows, &[7; 40])?;
    for row in 0..3 {
        expected[300 + 256 * row..][..8].fill(7);
    }
    ensure(
        read(&tensor)? == expected,
        "partial writes are not where they belong",
    )?;
    let mut out = [0; 40];
    tensor.read_rows(rows, &mut out)?;
    let gaps = |i: usize| i % 16 >= 8;
    ensure(
        (0..40).all(|i| out[i] == if gaps(i) { 0 } else { 7 }),
        "rows are not read at their distances",
    )?;
    tensor.buffer.clear(3)?;
    ensure(
        read(&tensor)?.iter().all(|&byte| byte == 3),
        "clear() leaves something",
    )
}

fn accesses_are_checked(bench: &Bench) -> Check {
    let tensor = bench.tensor(&bench.device.buffer_type())?;
    let len = tensor.layout().bytes();
    let outside = Slot {
        offset: tensor.buffer.size(),
        layout: *tensor.layout(),
    };
    let buffer = &tensor.buffer;
    let mistakes = [
        ("a write behind the end", tensor.write(len - 1, &[0; 2])),
        ("a write that overflows", tensor.write(usize::MAX, &[0; 2])),
        ("a read behind the end", tensor.read(len, &mut [0])),
        (
            "a write outside of the buffer",
            buffer.write(outside, 0, &[0; 4]),
        ),
        (
            "a read outside of the buffer",
            buffer.read(outside, 0, &mut [0; 4]),
        ),
        (
            "a fill outside of the buffer",
            buffer.fill(outside, 0, 4, 1),
        ),
    ];
    for (what, result) in mistakes {
        ensure(result.is_err(), format!("{what} is no error"))?;
    }
    Ok(())
}

fn locations(bench: &Bench) -> Check {
    let memory = bench.device.buffer_type();
    let (a, b) = (bench.tensor(&memory)?, bench.tensor(&memory)?);
    ensure(
        a.buffer.location() == a.buffer.location(),
        "a buffer's location changes",
    )?;
    ensure(
        a.overlaps(&a) && !a.overlaps(&b) && !b.overlaps(&a),
        "the locations of two buffers overlap",
    )?;
    match a.buffer.host() {
        Some(host) => ensure(
            a.buffer.location() == host.location(),
            "a buffer over host memory lies elsewhere than the memory",
        ),
        None => Ok(()),
    }
}

fn sizes_in_bulk(bench: &Bench) -> Check {
    let mut memories = vec![bench.device.buffer_type()];
    memories.extend(bench.device.extra_buffer_types());
    for memory in memories {
        let layouts = [[N, 1, 1, 1], [N, N, 1, 1], [2 * N, 3, 2, 1]];
        let mut infos = Vec::new();
        for shape in layouts {
            let layout = Layout::contiguous(DType::F32, shape)?;
            infos.push(TensorInfo::new("w", layout, Usage::Weights));
        }
        let one_by_one: Result<Vec<_>> = infos.iter().map(|info| memory.alloc_size(info)).collect();
        let (Ok(one_by_one), Ok(all)) = (one_by_one, memory.alloc_sizes(&infos)) else {
            continue; // special memory need not take such tensors
        };
        ensure(one_by_one == all, "sizes asked for together are others")?;
    }
    Ok(())
}

fn answers_in_bulk(bench: &Bench) -> Check {
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [N, N, 1, 1])?;
    for op in [Op::Sqr, Op::CumSum, Op::Transpose, Op::SumRows] {
        graph.push(op, &[Some(x)])?;
    }
    graph.mul_mat(x, x)?;
    let ids: Vec<_> = graph
        .ids()
        .filter(|&id| graph.tensor(id).is_computed())
        .collect();
    let together = bench.device.supports_each(&graph, &ids);
    let answers = ids.iter().map(|&id| bench.device.supports(graph.node(id)));
    ensure(
        answers.eq(together),
        "answers given together are others than one by one",
    )?;
    let supported: Vec<_> = ids
        .into_iter()
        .filter(|&id| bench.device.supports(graph.node(id)).is_yes())
        .collect();
    let parts: Vec<&[TensorId]> = supported.chunks(1).chain([&supported[..]]).collect();
    let mut expected = Vec::new();
    for part in &parts {
        expected.push(bench.device.workspace(&graph, part)?);
    }
    ensure(
        bench.device.workspaces(&graph, &parts)? == expected,
        "workspaces asked for together are others than one by one",
    )
}

fn too_much_memory(bench: &Bench) -> Check {
    let memory = bench.device.buffer_type();
    let result = memory.allocate(isize::MAX as usize / 2, Usage::Any);
    ensure(
        matches!(result, Err(Error::OutOfMemory { .. })),
        "asking for four exabytes is not an out-of-memory error",
    )
}

fn copies_between_memories(bench: &Bench) -> Check {
    let memories = [bench.device.buffer_type(), host_buffer_type()];
    for from in &memories {
        for to in &memories {
            let (source, target) = (bench.tensor(from)?, bench.tensor(to)?);
            source.write(0, &pattern(2))?;
            target.copy_from(&source)?;
            ensure(
                read(&target)? == pattern(2),
                format!("a copy from {} to {} differs", from.name(), to.name()),
            )?;
        }
    }
    // Weights in a form of their own come back as they were.
    for extra in bench.device.extra_buffer_types() {
        let Ok(target) = bench.tensor(&extra) else {
            continue;
        };
        let source = bench.tensor(&host_buffer_type())?;
        source.write(0, &pattern(3))?;
        target.copy_from(&source)?;
        match target.read(0, &mut vec![0; target.layout().bytes()]) {
            Ok(()) => ensure(
                read(&target)? == pattern(3),
                format!("what lies in {} does not come back", extra.name()),
            )?,
            Err(Error::Unsupported { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn work_is_done_in_order(bench: &Bench) -> Check {
    let work = bench.work()?;
    let mut stream = bench.stream()?;
    let mut prepared = stream.prepare(work.placed())?;
    let (x, y) = (work.place(work.x), work.place(work.y));
    let cancel = CancelToken::new();
    // Everything is queued before anything is waited for.
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

fn prepared_work_runs_again(bench: &Bench) -> Check {
    let work = bench.work()?;
    let mut stream = bench.stream()?;
    let mut prepared = stream.prepare(work.placed())?;
    for seed in 0..3 {
        stream.write(work.place(work.x), 0, &pattern(seed))?;
        stream.run(&mut *prepared, control(&CancelToken::new()))?;
        stream.synchronize()?;
        ensure(
            read(work.place(work.y))? == bench.result_of(&pattern(seed))?,
            format!("run {seed} differs"),
        )?;
    }
    Ok(())
}

fn compiled_work_is_shared(bench: &Bench) -> Check {
    let (work, other) = (bench.work()?, bench.work()?);
    let (graph, cancel) = (&work.graph, CancelToken::new());
    let device = &bench.device;
    let Some(compiled) = device.compile(graph, &work.nodes, None, &cancel)? else {
        return skip("it has nothing to compile");
    };
    let again = device.compile(graph, &work.nodes, Some(&compiled), &cancel)?;
    ensure(
        again.is_some_and(|again| Arc::ptr_eq(&again, &compiled)),
        "the same nodes are compiled again",
    )?;
    let mut results = Vec::new();
    for work in [&work, &other] {
        let mut stream = bench.stream()?;
        let mut prepared = stream.prepare(Placed {
            compiled: Some(&compiled),
            ..work.placed()
        })?;
        stream.write(work.place(work.x), 0, &pattern(7))?;
        stream.run(&mut *prepared, control(&cancel))?;
        stream.synchronize()?;
        results.push(read(work.place(work.y))?);
    }
    let expected = bench.result_of(&pattern(7))?;
    ensure(
        results.iter().all(|result| *result == expected),
        "compiled work gives other results",
    )
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

fn foreign_work(bench: &Bench) -> Check {
    struct Nothing;
    impl samite_core::Prepared for Nothing {
        fn as_any(&mut self) -> &mut dyn std::any::Any {
            self
        }
    }
    let mut stream = bench.stream()?;
    let result = stream.run(&mut Nothing, control(&CancelToken::new()));
    ensure(
        result.is_err(),
        "work that another device prepared is no error",
    )?;
    let mut work = bench.work()?;
    work.places[work.x.index()] = None;
    ensure(
        stream.prepare(work.placed()).is_err(),
        "an operand without a place is no error",
    )
}

fn overlapping_places(bench: &Bench) -> Check {
    let mut work = bench.work()?;
    let row = 4 * N;
    let layout = Layout::contiguous(DType::F32, [N, N + 1, 1, 1])?;
    let memory = bench.device.buffer_type();
    let whole = TensorGroup::allocate(&memory, Usage::Compute, &[("t", layout)])?;
    for (id, offset) in [(work.x, 0), (work.y, row)] {
        work.places[id.index()] = Some(TensorRef {
            buffer: Arc::clone(&whole.buffers[0]),
            slot: Slot {
                offset,
                layout: matrix()?,
            },
        });
    }
    ensure(
        bench.stream()?.prepare(work.placed()).is_err(),
        "a result over a part of its operand is no error",
    )
}

fn streams_copy(bench: &Bench) -> Check {
    let own = bench.device.buffer_type();
    let mut any = false;
    for (from, to) in [
        (own.clone(), own.clone()),
        (own.clone(), host_buffer_type()),
        (host_buffer_type(), own),
    ] {
        let (source, target) = (bench.tensor(&from)?, bench.tensor(&to)?);
        let mut stream = bench.stream()?;
        if !bench.device.can_copy(&from, &to) {
            continue;
        }
        any = true;
        source.write(0, &pattern(8))?;
        stream.copy(&source, &target)?;
        stream.synchronize()?;
        ensure(
            read(&target)? == pattern(8),
            format!("a copy from {} to {} differs", from.name(), to.name()),
        )?;
    }
    match any {
        true => Ok(()),
        false => skip("its streams do not copy"),
    }
}

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
        // The host waits in every other round, another stream in the others.
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

fn import(bench: &Bench) -> Check {
    let device = &bench.device;
    let bytes = matrix()?.bytes();
    let memory = HostMemory::allocate(bytes, "host", "memory to import")?;
    if !device.capabilities().import_host {
        let result = device.import_host(memory, Usage::Any);
        ensure(result.is_err(), "it imports and says that it cannot")?;
        return skip("it does not import host memory");
    }
    let alignment = device.import_alignment();
    ensure(
        alignment.is_power_of_two(),
        "the alignment is no power of two",
    )?;
    if !memory.location().offset.is_multiple_of(alignment) {
        return skip("the allocator's memory is not aligned enough");
    }
    let buffer: Arc<dyn Buffer> = device.import_host(Arc::clone(&memory), Usage::Any)?;
    ensure(
        buffer.location() == memory.location(),
        "imported memory lies elsewhere, so that nobody sees conflicts",
    )?;
    let imported = StoredTensor::new("imported", buffer, 0, matrix()?)?;
    let plain = host_buffer(Arc::clone(&memory), Usage::Any);
    let plain = StoredTensor::new("plain", plain, 0, matrix()?)?;
    ensure(
        imported.tensor().overlaps(plain.tensor()),
        "an import does not overlap with what it imports",
    )?;
    plain.tensor().write(0, &pattern(9))?;
    ensure(
        read(imported.tensor())? == pattern(9),
        "an import does not see what the host writes",
    )?;
    imported.tensor().write(0, &pattern(10))?;
    ensure(
        read(plain.tensor())? == pattern(10),
        "the host does not see what is written to an import",
    )
}

fn pinned_memory(bench: &Bench) -> Check {
    let Some(memory) = bench.device.host_buffer_type() else {
        ensure(
            !bench.device.capabilities().host_buffer,
            "it says that it has pinned memory, and has none",
        )?;
        return skip("it has no pinned memory");
    };
    ensure(memory.is_host(), "its pinned memory is no host memory")?;
    let tensor = bench.tensor(&memory)?;
    ensure(
        tensor.buffer.host().is_some(),
        "its pinned memory is not to be seen by the host",
    )?;
    tensor.write(0, &pattern(11))?;
    let own = bench.tensor(&bench.device.buffer_type())?;
    own.copy_from(&tensor)?;
    ensure(
        read(&own)? == pattern(11),
        "a copy from pinned memory differs",
    )
}
