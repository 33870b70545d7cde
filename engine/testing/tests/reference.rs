//! Runs the suite on the reference itself, and on devices with planted bugs.
#![allow(clippy::unwrap_used)]

use samite_core::op::{Glu, Unary};
use samite_core::{
    BufferType, Device, DeviceKind, Node, OpKind, PlacedGraph, Prepared, RunControl, Stream,
    Support,
};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_testing::{Limit, Outcome, cases, run_case, run_case_in, run_suite};
use std::any::Any;
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

fn reference(name: &str) -> Arc<dyn Device> {
    ReferenceDevice::new(ReferenceOptions::named(name))
}

#[test]
fn the_reference_passes_every_case() {
    let report = run_suite(&reference("reference"), None, &mut |_| {});
    assert_eq!(report.failed(), 0, "{report}");
    assert_eq!(
        report.unsupported(),
        0,
        "a case that no device supports is a mistake:\n{report}"
    );
    assert!(report.passed() >= 3500, "{report}");
    assert!(
        report.ops.values().all(|counts| counts.worst_nmse == 0.0),
        "{report}"
    );
}

#[test]
fn an_asynchronous_device_passes_too() {
    let device: Arc<dyn Device> = ReferenceDevice::new(ReferenceOptions {
        asynchronous: true,
        ..ReferenceOptions::default()
    });
    for filter in ["mul_mat", "cpy", "views"] {
        let report = run_suite(&device, Some(filter), &mut |_| {});
        assert!(report.is_success() && report.unsupported() == 0, "{report}");
    }
}

#[test]
fn weights_are_tested_in_other_memory() {
    let device = reference("reference");
    // The device's own memory is the simplest layout of a weight.
    let memory = device.buffer_type();
    let with_weights = cases()
        .into_iter()
        .filter(|case| case.inputs.iter().any(|input| input.weights));
    let mut count = 0;
    for case in with_weights.step_by(7) {
        count += 1;
        let outcome = run_case_in(&device, &reference("other"), &case, &memory);
        assert_eq!(outcome, Outcome::Passed { nmse: 0.0 }, "{}", case.name);
    }
    assert!(count > 50, "{count} cases");
    // Memory that the device cannot use is detected.
    let foreign = reference("foreign").buffer_type();
    let case = cases()
        .into_iter()
        .find(|case| case.op == "mul_mat")
        .unwrap();
    match run_case_in(&device, &reference("other"), &case, &foreign) {
        Outcome::Error { message } => assert!(message.contains("cannot use"), "{message}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn cases_have_unique_names_and_cover_every_operation() {
    let all = cases();
    let mut names = HashSet::new();
    let twice: Vec<_> = all
        .iter()
        .map(|case| &case.name)
        .filter(|name| !names.insert(*name))
        .collect();
    assert!(twice.is_empty(), "{twice:#?}");
    // Computing operations have their own cases; views are tested as operands.
    let mut covered = BTreeSet::from([OpKind::Leaf]);
    for case in &all {
        let graph = &case.graph;
        covered.insert(graph.tensor(case.output).op.kind());
        let views = graph.tensors().iter().filter(|t| t.op.is_view());
        covered.extend(views.map(|tensor| tensor.op.kind()));
    }
    let kinds = OpKind::ALL.into_iter();
    let missing: Vec<_> = kinds.filter(|kind| !covered.contains(kind)).collect();
    assert!(missing.is_empty(), "no case of {missing:?}");
    let names: BTreeSet<_> = all.iter().map(|case| case.op).collect();
    let functions = Unary::ALL.iter().map(|function| function.name());
    let units = Glu::ALL.iter().map(|unit| unit.name());
    for name in functions.chain(units) {
        assert!(names.contains(name), "no case of {name}");
    }
    assert!(all.iter().filter(|case| case.in_place.is_some()).count() > 300);
}

#[test]
fn reports_count_and_filter() {
    let device: Arc<dyn Device> = ReferenceDevice::new(ReferenceOptions {
        without_ops: vec!["norm".into()],
        ..ReferenceOptions::default()
    });
    let mut seen = 0;
    let report = run_suite(&device, Some("norm"), &mut |progress| {
        seen += 1;
        assert!(progress.case < progress.cases);
    });
    assert_eq!(
        seen,
        report.passed() + report.unsupported() + report.failed()
    );
    assert!(report.ops["norm"].unsupported > 20 && report.ops["norm"].passed == 0);
    assert!(report.ops["rms_norm"].passed > 20 && report.is_success());
    let reasons = &report.to_json()["ops"]["norm"]["reasons"];
    assert!(reasons["it was made without norm"].as_u64().unwrap() > 20);
    assert!(report.to_string().contains("rms_norm"));
}

/// A planted bug, applied after each run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum PlantedBug {
    /// Results are slightly off.
    Inexact,
    /// The byte after a result is written.
    Overrun,
    /// A source is written.
    Source,
    /// Nothing is computed.
    Nothing,
}

/// A reference device with a planted bug.
#[derive(Debug)]
struct FaultyDevice(Arc<ReferenceDevice>, PlantedBug);

struct WrongStream(Box<dyn Stream>, PlantedBug);

struct WrongPrepared {
    inner: Box<dyn Prepared>,
    /// The result and its buffer, and the first source.
    places: Vec<samite_core::TensorRef>,
}

impl Prepared for WrongPrepared {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}

impl Device for FaultyDevice {
    fn name(&self) -> &str {
        "wrong"
    }
    fn description(&self) -> String {
        format!("{:?}", self.1)
    }
    fn kind(&self) -> DeviceKind {
        self.0.kind()
    }
    fn buffer_type(&self) -> Arc<dyn BufferType> {
        self.0.buffer_type()
    }
    fn supports(&self, node: Node<'_>) -> Support {
        self.0.supports(node)
    }
    fn supports_buffer_type(&self, buffer_type: &Arc<dyn BufferType>) -> bool {
        self.0.supports_buffer_type(buffer_type)
    }
    fn open_stream(self: Arc<Self>) -> samite_core::Result<Box<dyn Stream>> {
        Ok(Box::new(WrongStream(
            Arc::clone(&self.0).open_stream()?,
            self.1,
        )))
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Stream for WrongStream {
    fn device(&self) -> &dyn Device {
        self.0.device()
    }
    fn prepare(&mut self, work: PlacedGraph<'_>) -> samite_core::Result<Box<dyn Prepared>> {
        let node = work.computed().last().unwrap();
        let places = [Some(node.id()), node.source(0).map(|source| source.id())];
        Ok(Box::new(WrongPrepared {
            places: places
                .into_iter()
                .flatten()
                .map(|id| work.place(id).unwrap().clone())
                .collect(),
            inner: self.0.prepare(work)?,
        }))
    }
    fn run(
        &mut self,
        prepared: &mut dyn Prepared,
        control: RunControl<'_>,
    ) -> samite_core::Result<()> {
        let prepared = prepared.as_any().downcast_mut::<WrongPrepared>().unwrap();
        let [result, source] = &prepared.places[..] else {
            return self.0.run(&mut *prepared.inner, control);
        };
        if self.1 != PlantedBug::Nothing {
            self.0.run(&mut *prepared.inner, control)?;
        }
        match self.1 {
            PlantedBug::Inexact => {
                let mut first = [0; 4];
                result.read(0, &mut first)?;
                result.write(0, &(f32::from_le_bytes(first) + 0.5).to_le_bytes())
            }
            PlantedBug::Overrun => result
                .buffer
                .write(result.slot, result.layout().bytes(), &[1]),
            PlantedBug::Source => {
                let len = source.layout().bytes().min(2);
                source.write(0, &[0x12, 0x34][..len])
            }
            PlantedBug::Nothing => Ok(()),
        }
    }
    fn synchronize(&mut self) -> samite_core::Result<()> {
        self.0.synchronize()
    }
}

#[test]
fn planted_bugs_are_found() {
    let wanted = ["rms_norm", "mul", "silu", "mul_mat", "soft_max"];
    let all = cases();
    for (mistake, problem) in [
        (PlantedBug::Inexact, "NMSE"),
        (PlantedBug::Overrun, "behind the end of a tensor"),
        (PlantedBug::Source, "was changed"),
        (PlantedBug::Nothing, "NMSE"),
    ] {
        let inner = ReferenceDevice::new(ReferenceOptions::default());
        let device: Arc<dyn Device> = Arc::new(FaultyDevice(inner, mistake));
        let picked = all.iter().filter(|case| {
            let output = case.graph.tensor(case.output);
            wanted.contains(&case.op)
                && case.in_place.is_none()
                && case
                    .graph
                    .node(case.output)
                    .source(0)
                    .is_some_and(|x| x.tensor().flags.input)
                && output.layout.elements() < 50
                && output.layout.elements() > 0
                && output.layout.dtype() == samite_core::DType::F32
                && matches!(case.limit, Limit::Nmse(limit) if limit <= 1e-6)
        });
        let mut count = 0;
        for case in picked {
            count += 1;
            match run_case(&device, &reference("other"), case) {
                Outcome::Failed { detail, .. } => assert!(detail.contains(problem), "{detail}"),
                other => panic!("{mistake:?} was not found in {}: {other:?}", case.name),
            }
        }
        assert!(count > 10, "{count} cases");
    }
}
