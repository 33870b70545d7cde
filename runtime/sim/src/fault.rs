//! Fault injection: the kinds of faults, and when they strike.

use samite_testing::Rng;
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// Declares the kinds of faults with their names.
macro_rules! faults {
    ($($(#[$doc:meta])* $kind:ident = $name:literal,)*) => {
        /// Kind of injected fault.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Fault {
            $($(#[$doc])* $kind,)*
        }

        impl Fault {
            /// All kinds.
            pub const ALL: &'static [Fault] = &[$(Fault::$kind),*];

            /// Returns the name used for printing and parsing.
            pub fn name(self) -> &'static str {
                match self {
                    $(Fault::$kind => $name,)*
                }
            }
        }
    };
}

faults! {
    /// A buffer cannot be allocated.
    Allocate = "allocate",
    /// Host memory cannot be imported.
    Import = "import",
    /// A stream cannot be opened.
    OpenStream = "open-stream",
    /// An event cannot be created.
    CreateEvent = "create-event",
    /// Nodes cannot be compiled.
    Compile = "compile",
    /// Work cannot be bound to tensor locations.
    Prepare = "prepare",
    /// The host cannot write to a buffer.
    Write = "write",
    /// The host cannot read from a buffer.
    Read = "read",
    /// A node fails while it is computed.
    Compute = "compute",
    /// A stream copy fails.
    Copy = "copy",
    /// An event cannot be recorded.
    Record = "record",
    /// A stream cannot wait for an event.
    Wait = "wait",
    /// Waiting for a stream or an event fails.
    Synchronize = "synchronize",
    /// A device is lost while it computes.
    Lose = "lose",
    /// A device is lost while it copies.
    LoseInCopy = "lose-in-copy",
    /// Work never ends; after some seconds the device counts as lost.
    Stall = "stall",
    /// A copy arrives in pieces, with other work in between. Not an error: readers must wait for
    /// its end.
    Torn = "torn",
    /// The caller cancels the run.
    Cancel = "cancel",
    /// A file is shorter than it was.
    Shrink = "shrink",
    /// Reading a file fails.
    ReadFile = "read-file",
    /// The clock suddenly jumps far ahead. Not an error.
    ClockJump = "clock-jump",
    /// A graph is split unnecessarily. Not an error, nor are the following ones.
    Split = "split",
    /// A graph that already has a plan is planned again.
    PlanAgain = "plan-again",
    /// A plan is evicted although the cache has room.
    ForgetPlan = "forget-plan",
    /// A file is read in the smallest pieces.
    SmallChunks = "small-chunks",
    /// A connection breaks; data in flight is lost.
    Cut = "cut",
    /// A connection silently stops delivering data.
    Silence = "silence",
    /// The server exits and another one starts.
    Restart = "restart",
    /// Bytes arrive seconds later. Not an error.
    Late = "late",
}

impl Fault {
    /// Returns whether the fault must have no visible effect.
    pub fn is_harmless(self) -> bool {
        use Fault::{ClockJump, ForgetPlan, Late, PlanAgain, SmallChunks, Split, Torn};
        matches!(
            self,
            ClockJump | ForgetPlan | Late | PlanAgain | SmallChunks | Split | Torn
        )
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let mut all = Fault::ALL.iter();
        all.find(|fault| fault.name() == name)
            .copied()
            .ok_or_else(|| format!("there is no fault called '{name}'"))
    }
}

/// A fault at its `occasion`th opportunity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FaultOccurrence {
    /// Kind of fault.
    pub fault: Fault,
    /// Number of the opportunity, counted from 0.
    pub occasion: u64,
}

impl fmt::Display for FaultOccurrence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.fault, self.occasion)
    }
}

impl FromStr for FaultOccurrence {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (fault, occasion) = text
            .split_once('@')
            .ok_or_else(|| format!("'{text}' is not of the form fault@occasion"))?;
        Ok(FaultOccurrence {
            fault: fault.parse()?,
            occasion: occasion
                .parse()
                .map_err(|_| format!("'{occasion}' is not the number of an occasion"))?,
        })
    }
}

/// Source of faults.
#[derive(Clone, Debug)]
enum Source {
    /// Drawn at random. Each kind has its own probability (one in so many opportunities, or never)
    /// and its own random numbers, so leaving out one kind does not affect the others.
    Drawn(Vec<Option<(usize, Rng)>>),
    /// Exactly these.
    Listed(BTreeSet<FaultOccurrence>),
}

/// Decides at each opportunity whether a fault strikes, and counts.
#[derive(Clone, Debug)]
pub(crate) struct Faults {
    source: Source,
    /// Opportunities so far, by kind.
    occasions: Vec<u64>,
    /// Faults that struck.
    struck: Vec<FaultOccurrence>,
    /// No fault strikes while this is off.
    pub armed: bool,
    /// Number of harmful drawn faults that may still strike while armed: a run in which everything
    /// fails tests little.
    pub left: usize,
}

impl Faults {
    /// Draws faults from a seed. Each seed enables few kinds, some frequent and some rare.
    pub fn drawn(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let kinds = Fault::ALL.iter().map(|&fault| {
            let seed = rng.bits();
            let buggify = rng.pick(&[2, 5, 20, 60]);
            rng.one_in(4)
                .then(|| (buggify, Rng::new(seed ^ fault as u64)))
        });
        Faults::from(Source::Drawn(kinds.collect()))
    }

    /// Injects exactly these faults.
    pub fn listed(strikes: &[FaultOccurrence]) -> Self {
        Faults::from(Source::Listed(strikes.iter().copied().collect()))
    }

    fn from(source: Source) -> Self {
        Faults {
            source,
            occasions: vec![0; Fault::ALL.len()],
            struck: Vec::new(),
            armed: false,
            left: usize::MAX,
        }
    }

    /// Returns the faults that struck so far.
    pub fn struck(&self) -> &[FaultOccurrence] {
        &self.struck
    }

    /// Returns whether `fault` strikes at this opportunity.
    pub fn strikes(&mut self, fault: Fault) -> bool {
        if !self.armed {
            return false;
        }
        let kind = fault as usize;
        let occasion = self.occasions[kind];
        self.occasions[kind] += 1;
        let strike = FaultOccurrence { fault, occasion };
        let strikes = match &mut self.source {
            Source::Drawn(_) if self.left == 0 && !fault.is_harmless() => false,
            Source::Drawn(kinds) => kinds[kind]
                .as_mut()
                .is_some_and(|(buggify, rng)| rng.one_in(*buggify)),
            Source::Listed(strikes) => strikes.contains(&strike),
        };
        if strikes {
            self.left -= usize::from(self.left > 0 && !fault.is_harmless());
            self.struck.push(strike);
        }
        strikes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_faults_replay_from_a_list() {
        let all = |faults: &mut Faults| {
            faults.armed = true;
            for _ in 0..50 {
                for &fault in Fault::ALL {
                    faults.strikes(fault);
                }
            }
            faults.struck().to_vec()
        };
        let drawn = all(&mut Faults::drawn(3));
        assert!(!drawn.is_empty());
        assert_eq!(all(&mut Faults::listed(&drawn)), drawn);
        let one = drawn[drawn.len() / 2];
        assert_eq!(all(&mut Faults::listed(&[one])), [one]);
    }

    #[test]
    fn fault_names_round_trip() {
        for &fault in Fault::ALL {
            let strike = FaultOccurrence { fault, occasion: 7 };
            assert_eq!(strike.to_string().parse(), Ok(strike));
        }
        assert!("lose".parse::<FaultOccurrence>().is_err());
        assert!("nothing@3".parse::<FaultOccurrence>().is_err());
    }
}
