//! Every call into a device can fail, at any time: the scheduler returns the error, nothing panics,
//! and it works afterwards.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{bytes, device, layers, read};
use samite_core::{CancelToken, Device, DeviceKind, Error, Result};
use samite_reference::{FaultPlan, Latch};
use samite_sched::{Options, Scheduler};
use std::sync::Arc;

struct Setup {
    faults: Arc<FaultPlan>,
    devices: Vec<Arc<dyn Device>>,
    copies: usize,
}

impl Setup {
    fn new(asynchronous: bool, events: bool, device_copies: bool, copies: usize) -> Self {
        let faults = FaultPlan::new();
        let devices = vec![
            device("first", |o| {
                (o.asynchronous, o.events, o.copies, o.faults) = (
                    asynchronous,
                    events,
                    device_copies,
                    Some(Arc::clone(&faults)),
                );
            }),
            device("second", |o| {
                (o.asynchronous, o.faults) = (asynchronous, Some(Arc::clone(&faults)))
            }),
            device("host", |o| {
                (o.kind, o.faults) = (DeviceKind::Cpu, Some(Arc::clone(&faults)))
            }),
        ];
        Setup {
            faults,
            devices,
            copies,
        }
    }

    fn scheduler(&self) -> Result<Scheduler> {
        Scheduler::new(
            self.devices.clone(),
            Options {
                copies: self.copies,
                ..Default::default()
            },
        )
    }
}

#[test]
fn single_and_lasting_faults_only_cause_errors() {
    for (asynchronous, events, device_copies, copies) in [
        (false, false, false, 1),
        (true, false, false, 1),
        (true, true, false, 2),
        (true, true, true, 2),
    ] {
        let setup = Setup::new(asynchronous, events, device_copies, copies);
        let [first, second, host] = [0, 1, 2].map(|i| &setup.devices[i]);
        let (graph, x, y) = layers(&[first, second, first, host]);
        let work = |scheduler: &mut Scheduler| -> Result<Vec<Vec<f32>>> {
            scheduler.load(&graph)?;
            let mut results = Vec::new();
            for run in 0..3 {
                scheduler.write(x, 0, &bytes(&[run as f32; 16]))?;
                scheduler.run(&CancelToken::new())?;
                results.push(read(scheduler, y, 16)?);
            }
            scheduler.synchronize()?;
            Ok(results)
        };

        setup.faults.reset();
        let mut scheduler = setup.scheduler().unwrap();
        let expected = work(&mut scheduler).unwrap();
        let calls = setup.faults.calls();
        assert!(calls > 30, "{calls}");

        for at in 0..calls {
            for lasting in [false, true] {
                setup.faults.reset();
                if lasting {
                    setup.faults.fail_from(at)
                } else {
                    setup.faults.fail_at(at)
                }
                let mut scheduler = match setup.scheduler() {
                    Ok(scheduler) => scheduler,
                    Err(error) => {
                        assert!(error.to_string().contains("injected fault"), "{error}");
                        continue;
                    }
                };
                match work(&mut scheduler) {
                    Err(error) => assert!(error.to_string().contains("injected fault"), "{error}"),
                    // A single fault in work that is discarded anyway may go unnoticed, but must
                    // not change a result.
                    Ok(results) => assert!(!lasting && results == expected, "call {at} of {calls}"),
                }
                setup.faults.reset();
                assert_eq!(
                    work(&mut scheduler).unwrap(),
                    expected,
                    "after a fault at call {at} of {calls}"
                );
            }
        }
    }
}

#[test]
fn faults_in_watched_runs_are_errors() {
    let setup = Setup::new(false, false, false, 1);
    let (graph, x, y) = layers(&[&setup.devices[0], &setup.devices[1]]);
    let mut scheduler = setup.scheduler().unwrap();
    scheduler.load(&graph).unwrap();
    scheduler.write(x, 0, &bytes(&[1.0; 16])).unwrap();
    let watch = |scheduler: &mut Scheduler, everything: bool| {
        scheduler.run_watched(
            &CancelToken::new(),
            |_| everything,
            |_, place| {
                place.read(0, &mut [0; 4])?;
                Ok(samite_sched::Watch::Continue)
            },
        )
    };
    // With newly prepared pieces, and with those of the previous run.
    for is_new in [true, false] {
        let prepare = |scheduler: &mut Scheduler| {
            setup.faults.reset();
            watch(scheduler, !is_new).unwrap();
            setup.faults.reset();
        };
        prepare(&mut scheduler);
        watch(&mut scheduler, true).unwrap();
        let expected = read(&mut scheduler, y, 16).unwrap();
        prepare(&mut scheduler);
        watch(&mut scheduler, true).unwrap();
        let calls = setup.faults.calls();
        for at in 0..calls {
            prepare(&mut scheduler);
            setup.faults.fail_at(at);
            let error = watch(&mut scheduler, true).unwrap_err().to_string();
            assert!(error.contains("injected fault"), "call {at} of {calls}");
            prepare(&mut scheduler);
            watch(&mut scheduler, true).unwrap();
            assert_eq!(read(&mut scheduler, y, 16).unwrap(), expected);
        }
    }
}

#[test]
fn read_and_write_failures_are_reported_once() {
    let latch = Latch::new();
    let devices = [false, true].map(|host_memory| {
        device(&format!("host memory: {host_memory}"), |o| {
            (o.asynchronous, o.events) = (true, true);
            // The other device copies from there by itself, so that the host does not wait.
            (o.host_memory, o.copies) = (host_memory, !host_memory);
            o.latch = Some(Arc::clone(&latch));
        })
    });
    let (graph, x, y) = layers(&[&devices[1], &devices[0]]);
    let mut scheduler = Scheduler::new(devices.to_vec(), Options::default()).unwrap();
    scheduler.load(&graph).unwrap();
    let input = bytes(&[1.0; 16]);
    scheduler.write(x, 0, &input).unwrap();
    scheduler.run(&CancelToken::new()).unwrap();
    let expected = read(&mut scheduler, y, 16).unwrap();
    for reports in [
        |scheduler: &mut Scheduler, _, y| read(scheduler, y, 16).map(|_| ()),
        |scheduler: &mut Scheduler, x, _| scheduler.write(x, 0, &[0; 64]),
    ] {
        scheduler.write(x, 0, &input).unwrap();
        latch.close();
        let cancel = CancelToken::new();
        scheduler.run(&cancel).unwrap();
        cancel.cancel();
        latch.open();
        // Both streams fail.
        let error = reports(&mut scheduler, x, y).unwrap_err();
        assert!(matches!(error, Error::Cancelled), "{error}");
        scheduler.write(x, 0, &input).unwrap();
        scheduler.run(&CancelToken::new()).unwrap();
        assert_eq!(read(&mut scheduler, y, 16).unwrap(), expected);
    }
}
