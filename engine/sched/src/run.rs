//! One run of a plan, as a state machine.
//!
//! It says what comes next, and does nothing itself: no device, clock or thread is touched here. The [executor](crate::executor) performs each step, says how it
//! went, and gets the next one. So the steps of a run, and what is done when one fails, can be tested without devices.
//!
//! The order of actions and their waits are not decided here: the plan has them, from [`order`](crate::order).

use crate::order::{Action, Lane, Wait};
use samite_core::{Error, Result};

/// What is to be done next.
#[derive(Debug)]
pub(crate) enum Step {
    /// Let a lane wait for an action.
    Wait(Lane, Wait),
    /// Issue an action.
    Issue(usize),
    /// Record the end of an action, for those that wait for it.
    Record(usize),
    /// Wait until a lane has done all that was issued.
    Finish(Lane),
    /// Wait until all lanes have done what was issued, and ignore further failures: the first one ends the run.
    Drain,
    /// Nothing: the run is over.
    End(Result<()>),
}

/// How actions follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// An action begins when those that it waits for, by the plan, have ended. Actions of different lanes overlap.
    Overlapped,
    /// Each is done before the next one is issued, so that its results can be looked at. The plan's waits are left out: those for this run hold by
    /// themselves, and the caller has waited for earlier runs.
    OneByOne,
}

/// Which step was given out last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The action `next` was not issued yet: the wait of this number comes now, if it has so many.
    Waiting(usize),
    /// The action `next` was issued.
    Issued,
    /// Nothing is left to do about the action `next`; the one behind it comes now.
    Ended,
}

/// A run that has begun and not ended.
#[derive(Debug)]
pub(crate) struct Run {
    pace: Pace,
    /// The action that is worked on.
    next: usize,
    state: State,
    /// The first failure, the one to report: everything is being drained then.
    failure: Option<Error>,
}

impl Run {
    /// A run before its first step.
    pub fn new(pace: Pace) -> Self {
        Run {
            pace,
            next: 0,
            state: State::Waiting(0),
            failure: None,
        }
    }

    /// The step after one that ended with `last`; the first one if that is `Ok` and nothing was done yet. `actions` are the same in each call.
    ///
    /// A run that is `cancelled` stops before its next action. Within one, the device that performs it looks at the token.
    pub fn step(&mut self, actions: &[Action], last: Result<()>, cancelled: bool) -> Step {
        if let Some(failure) = self.failure.take() {
            return Step::End(Err(failure));
        }
        if let Err(failure) = last {
            return self.fail(failure);
        }
        loop {
            let Some(action) = actions.get(self.next) else {
                return Step::End(Ok(()));
            };
            match self.state {
                State::Waiting(0) if cancelled => return self.fail(Error::Cancelled),
                State::Waiting(number) => {
                    let waits: &[Wait] = match self.pace {
                        Pace::Overlapped => &action.waits,
                        Pace::OneByOne => &[],
                    };
                    if let Some(&wait) = waits.get(number) {
                        self.state = State::Waiting(number + 1);
                        return Step::Wait(action.lane, wait);
                    }
                    self.state = State::Issued;
                    return Step::Issue(self.next);
                }
                State::Issued => {
                    self.state = State::Ended;
                    match self.pace {
                        Pace::OneByOne => return Step::Finish(action.lane),
                        Pace::Overlapped if action.is_awaited => return Step::Record(self.next),
                        Pace::Overlapped => {}
                    }
                }
                State::Ended => {
                    self.next += 1;
                    self.state = State::Waiting(0);
                }
            }
        }
    }

    /// Ends the run with `failure`, but only after everything that was issued is done: work in flight would touch memory that the next run, or another plan, uses.
    fn fail(&mut self, failure: Error) -> Step {
        self.failure = Some(failure);
        Step::Drain
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::Work;

    fn wait(action: usize, runs_ago: usize) -> Wait {
        Wait { action, runs_ago }
    }

    /// Inputs, a copy that waits for two actions and is awaited, a split on the copy's lane.
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

    /// The steps of a run, and its failure, in which step number `fails` fails and the run is cancelled before step number `cancelled`.
    fn steps(
        pace: Pace,
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
            if let Step::End(result) = step {
                return (steps, result.err().map(|error| error.to_string()));
            }
            last = match fails {
                Some(at) if at == steps.len() => Err(Error::invalid(format!("step {at}"))),
                // What draining says does not matter.
                _ if matches!(step, Step::Drain) => Err(Error::invalid("while draining")),
                _ => Ok(()),
            };
            steps.push(match step {
                Step::Wait(lane, wait) => {
                    format!("{lane:?} waits for {} of {}", wait.action, wait.runs_ago)
                }
                Step::Issue(action) => format!("issue {action}"),
                Step::Record(action) => format!("record {action}"),
                Step::Finish(lane) => format!("finish {lane:?}"),
                Step::Drain => "drain".to_owned(),
                Step::End(_) => unreachable!(),
            });
        }
    }

    const OVERLAPPED: [&str; 6] = [
        "issue 0",
        "Device(1) waits for 0 of 0",
        "Device(1) waits for 2 of 1",
        "issue 1",
        "record 1",
        "issue 2",
    ];

    #[test]
    fn each_action_is_issued_after_its_waits_and_recorded_if_somebody_waits() {
        let (steps, result) = steps(Pace::Overlapped, None, None);
        assert_eq!(steps, OVERLAPPED);
        assert_eq!(result, None);
    }

    #[test]
    fn one_by_one_each_action_is_finished() {
        let (steps, result) = steps(Pace::OneByOne, None, None);
        let expected = [
            "issue 0",
            "finish Host",
            "issue 1",
            "finish Device(1)",
            "issue 2",
            "finish Device(1)",
        ];
        assert_eq!(steps, expected);
        assert_eq!(result, None);
    }

    #[test]
    fn after_a_failure_everything_is_drained_and_the_first_failure_is_reported() {
        for pace in [Pace::Overlapped, Pace::OneByOne] {
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
    fn a_run_stops_between_actions() {
        for (cancelled, issued) in [(0, 0), (1, 1), (2, 5), (4, 5), (5, 5)] {
            let (steps, result) = steps(Pace::Overlapped, None, Some(cancelled));
            let (before, last) = steps.split_at(issued);
            assert_eq!(before, &OVERLAPPED[..issued], "cancelled at {cancelled}");
            assert_eq!(last, ["drain"]);
            assert_eq!(result, Some(Error::Cancelled.to_string()));
        }
    }
}
