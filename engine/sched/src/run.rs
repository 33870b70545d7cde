//! One run of a plan, as a state machine.
//!
//! It determines the next step, but performs none: it touches no device, clock or thread. The
//! [executor](crate::executor) performs each step, reports the result and gets the next step. The
//! sequence of steps and the handling of failures can therefore be tested without devices.
//!
//! The order of actions and their waits come from the plan, which gets them from
//! [`order`](crate::order).

use crate::order::{Action, Lane, Wait};
use samite_core::{Error, Result};

/// Next step of a run.
#[derive(Debug)]
pub(crate) enum RunStep {
    /// Make a lane wait for an action.
    Wait(Lane, Wait),
    /// Issue an action.
    Issue(usize),
    /// Record the end of an action for its waiters.
    Record(usize),
    /// Wait until a lane has done all issued work.
    Finish(Lane),
    /// Wait until all lanes have done their issued work, and ignore further failures: the first one
    /// ends the run.
    Drain,
    /// The run is over.
    End(Result<()>),
}

/// Overlap of actions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OverlapMode {
    /// An action starts when the actions for which the plan makes it wait have ended. Actions of
    /// different lanes overlap.
    Overlapped,
    /// Each action is done before the next one is issued, so that its results can be inspected. The
    /// plan's waits are skipped: those within this run hold anyway, and the caller has waited for
    /// earlier runs.
    OneByOne,
}

/// The last step returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RunState {
    /// The action `next` is not issued yet. If it has a wait of this number, that comes now.
    Waiting(usize),
    /// The action `next` is issued.
    Issued,
    /// The action `next` is complete. The one after it comes now.
    Ended,
}

/// A run in progress.
#[derive(Debug)]
pub(crate) struct Run {
    pace: OverlapMode,
    /// The current action.
    next: usize,
    state: RunState,
    /// The first failure, which is reported. Everything is being drained after it.
    failure: Option<Error>,
}

impl Run {
    /// Returns a run before its first step.
    pub fn new(pace: OverlapMode) -> Self {
        Run {
            pace,
            next: 0,
            state: RunState::Waiting(0),
            failure: None,
        }
    }

    /// Returns the next step. `last` is the result of the previous step, or `Ok` before the first.
    /// `actions` must be the same in each call.
    ///
    /// A `cancelled` run stops before its next action. During an action, the device checks the
    /// token.
    pub fn step(&mut self, actions: &[Action], last: Result<()>, cancelled: bool) -> RunStep {
        if let Some(failure) = self.failure.take() {
            return RunStep::End(Err(failure));
        }
        if let Err(failure) = last {
            return self.fail(failure);
        }
        loop {
            let Some(action) = actions.get(self.next) else {
                return RunStep::End(Ok(()));
            };
            match self.state {
                RunState::Waiting(0) if cancelled => return self.fail(Error::Cancelled),
                RunState::Waiting(number) => {
                    let waits: &[Wait] = match self.pace {
                        OverlapMode::Overlapped => &action.waits,
                        OverlapMode::OneByOne => &[],
                    };
                    if let Some(&wait) = waits.get(number) {
                        self.state = RunState::Waiting(number + 1);
                        return RunStep::Wait(action.lane, wait);
                    }
                    self.state = RunState::Issued;
                    return RunStep::Issue(self.next);
                }
                RunState::Issued => {
                    self.state = RunState::Ended;
                    match self.pace {
                        OverlapMode::OneByOne => return RunStep::Finish(action.lane),
                        OverlapMode::Overlapped if action.is_awaited => {
                            return RunStep::Record(self.next);
                        }
                        OverlapMode::Overlapped => {}
                    }
                }
                RunState::Ended => {
                    self.next += 1;
                    self.state = RunState::Waiting(0);
                }
            }
        }
    }

    /// Ends the run with `failure` after everything issued is done. Work in flight would otherwise
    /// touch memory that the next run or another plan uses.
    fn fail(&mut self, failure: Error) -> RunStep {
        self.failure = Some(failure);
        RunStep::Drain
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::Work;

    fn wait(action: usize, runs_ago: usize) -> Wait {
        Wait { action, runs_ago }
    }

    /// Returns inputs, a copy that waits for two actions and is awaited, and a split on the copy's
    /// lane.
    fn actions() -> Vec<Action> {
        let action = |work, lane, waits: &[Wait], is_awaited| Action {
            work,
            lane,
            copier: None,
            waits: waits.to_vec(),
            is_awaited,
        };
        vec![
            action(Work::Inputs, Lane::Host, &[], false),
            action(
                Work::Copy(0),
                Lane::Device(1),
                &[wait(0, 0), wait(2, 1)],
                true,
            ),
            action(Work::Split(0), Lane::Device(1), &[], false),
        ]
    }

    /// Returns the steps of a run and its failure. Step number `fails` fails, and the run is
    /// cancelled before step number `cancelled`.
    fn steps(
        pace: OverlapMode,
        fails: Option<usize>,
        cancelled: Option<usize>,
    ) -> (Vec<String>, Option<String>) {
        let actions = actions();
        let mut run = Run::new(pace);
        let mut steps = Vec::new();
        let mut last = Ok(());
        loop {
            let is_cancelled = cancelled.is_some_and(|at| steps.len() >= at);
            let step = run.step(&actions, last, is_cancelled);
            if let RunStep::End(result) = step {
                return (steps, result.err().map(|error| error.to_string()));
            }
            last = match fails {
                Some(at) if at == steps.len() => Err(Error::invalid(format!("step {at}"))),
                // Failures while draining do not matter.
                _ if matches!(step, RunStep::Drain) => Err(Error::invalid("while draining")),
                _ => Ok(()),
            };
            steps.push(match step {
                RunStep::Wait(lane, wait) => {
                    format!("{lane:?} waits for {} of {}", wait.action, wait.runs_ago)
                }
                RunStep::Issue(action) => format!("start {action}"),
                RunStep::Record(action) => format!("record {action}"),
                RunStep::Finish(lane) => format!("finish {lane:?}"),
                RunStep::Drain => "drain".to_owned(),
                RunStep::End(_) => unreachable!(),
            });
        }
    }

    const OVERLAPPED: [&str; 6] = [
        "start 0",
        "Device(1) waits for 0 of 0",
        "Device(1) waits for 2 of 1",
        "start 1",
        "record 1",
        "start 2",
    ];

    #[test]
    fn actions_follow_their_waits_and_record_awaited_events() {
        let (steps, result) = steps(OverlapMode::Overlapped, None, None);
        assert_eq!(steps, OVERLAPPED);
        assert_eq!(result, None);
    }

    #[test]
    fn one_by_one_mode_finishes_each_action() {
        let (steps, result) = steps(OverlapMode::OneByOne, None, None);
        let expected = [
            "start 0",
            "finish Host",
            "start 1",
            "finish Device(1)",
            "start 2",
            "finish Device(1)",
        ];
        assert_eq!(steps, expected);
        assert_eq!(result, None);
    }

    #[test]
    fn failures_drain_the_run_and_report_the_first_error() {
        for pace in [OverlapMode::Overlapped, OverlapMode::OneByOne] {
            let (all, _) = steps(pace, None, None);
            for fails in 0..all.len() {
                let (steps, result) = steps(pace, Some(fails), None);
                let (before, last) = steps.split_at(fails + 1);
                assert_eq!(before, &all[..=fails]);
                assert_eq!(last, ["drain"]);
                assert!(result.unwrap().contains(&format!("step {fails}")));
            }
        }
    }

    #[test]
    fn cancellation_stops_between_actions() {
        for (cancelled, issued) in [(0, 0), (1, 1), (2, 5), (4, 5), (5, 5)] {
            let (steps, result) = steps(OverlapMode::Overlapped, None, Some(cancelled));
            let (before, last) = steps.split_at(issued);
            assert_eq!(before, &OVERLAPPED[..issued], "cancelled at {cancelled}");
            assert_eq!(last, ["drain"]);
            assert_eq!(result, Some(Error::Cancelled.to_string()));
        }
    }
}
