//! Faults: what can go wrong, and whether it does so now.

use samite_testing::Rng;
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// Declares the kinds of faults with their names.
macro_rules! faults {
    ($($(#[$doc:meta])* $kind:ident = $name:literal,)*) => {
        /// Something that goes wrong.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Fault {
            $($(#[$doc])* $kind,)*
        }

        impl Fault {
            /// All kinds.
            pub const ALL: &'static [Fault] = &[$(Fault::$kind),*];

            /// The name that is printed and read.
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
    /// Work cannot be bound to places.
    Prepare = "prepare",
    /// The host cannot write to a buffer.
    Write = "write",
    /// The host cannot read from a buffer.
    Read = "read",
    /// A node fails while it is computed.
    Compute = "compute",
    /// A copy of a stream fails.
    Copy = "copy",
    /// An event cannot be recorded.
    Record = "record",
    /// A stream cannot be told to wait.
    Wait = "wait",
    /// Waiting for a stream or an event fails.
    Synchronize = "synchronize",
    /// A device is gone while it computes.
    Lose = "lose",
    /// A device is gone while it copies.
    LoseInCopy = "lose-in-copy",
    /// Work never ends; after some seconds the device counts as lost.
    Stall = "stall",
    /// A copy arrives in pieces, with other work between them. Not an error: nobody may look before the end.
    Torn = "torn",
    /// The caller cancels the run.
    Cancel = "cancel",
    /// A file is shorter than it was.
    Shrink = "shrink",
    /// Reading a file fails.
    ReadFile = "read-file",
    /// The clock is far ahead all at once. Not an error.
    ClockJump = "clock-jump",
    /// A graph is cut where it need not be. Not an error, as are the next ones.
    Split = "split",
    /// A graph that has a plan is planned again.
    PlanAgain = "plan-again",
    /// A plan is forgotten although there is room.
    ForgetPlan = "forget-plan",
    /// A file is read in the smallest pieces.
    SmallChunks = "small-chunks",
    /// A connection breaks: what is on its way is lost.
    Cut = "cut",
    /// Nothing that a connection carries arrives any more.
    Silence = "silence",
    /// A server ends, and another one begins.
    Restart = "restart",
    /// Bytes arrive seconds later. Not an error.
    Late = "late",
}

impl Fault {
    /// Whether nobody should notice.
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

/// The `occasion`th time that something can go wrong in one way, it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Strike {
    /// How.
    pub fault: Fault,
    /// When, counted from 0.
    pub occasion: u64,
}

impl fmt::Display for Strike {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.fault, self.occasion)
    }
}

impl FromStr for Strike {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (fault, occasion) = text
            .split_once('@')
            .ok_or_else(|| format!("'{text}' is not of the form fault@occasion"))?;
        Ok(Strike {
            fault: fault.parse()?,
            occasion: occasion
                .parse()
                .map_err(|_| format!("'{occasion}' is not the number of an occasion"))?,
        })
    }
}

/// Where faults come from.
#[derive(Clone, Debug)]
enum Source {
    /// Each kind has its own chance of one in so many occasions, or none, and its own random numbers, so that leaving out one kind changes
    /// nothing about the others.
    Drawn(Vec<Option<(usize, Rng)>>),
    /// Only these.
    Listed(BTreeSet<Strike>),
}

/// Decides at each occasion whether a fault strikes, and counts.
#[derive(Clone, Debug)]
pub(crate) struct Faults {
    source: Source,
    /// Occasions so far, by kind.
    occasions: Vec<u64>,
    /// What struck.
    struck: Vec<Strike>,
    /// No fault strikes while this is off.
    pub armed: bool,
    /// How many drawn faults that do harm may strike while armed: a run in which everything fails shows little.
    pub left: usize,
}

impl Faults {
    /// Faults drawn from a seed. Each seed has few kinds of them, some often and some seldom.
    pub fn drawn(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let kinds = Fault::ALL.iter().map(|&fault| {
            let seed = rng.bits();
            let chance = rng.pick(&[2, 5, 20, 60]);
            rng.one_in(4)
                .then(|| (chance, Rng::new(seed ^ fault as u64)))
        });
        Faults::from(Source::Drawn(kinds.collect()))
    }

    /// Exactly these.
    pub fn listed(strikes: &[Strike]) -> Self {
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

    /// What struck so far.
    pub fn struck(&self) -> &[Strike] {
        &self.struck
    }

    /// Whether `fault` strikes at this occasion.
    pub fn strikes(&mut self, fault: Fault) -> bool {
        if !self.armed {
            return false;
        }
        let kind = fault as usize;
        let occasion = self.occasions[kind];
        self.occasions[kind] += 1;
        let strike = Strike { fault, occasion };
        let strikes = match &mut self.source {
            Source::Drawn(_) if self.left == 0 && !fault.is_harmless() => false,
            Source::Drawn(kinds) => kinds[kind]
                .as_mut()
                .is_some_and(|(chance, rng)| rng.one_in(*chance)),
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
    fn what_struck_strikes_again_from_a_list() {
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
    fn every_kind_of_fault_has_a_name_that_is_read_again() {
        for &fault in Fault::ALL {
            let strike = Strike { fault, occasion: 7 };
            assert_eq!(strike.to_string().parse(), Ok(strike));
        }
        assert!("lose".parse::<Strike>().is_err());
        assert!("nothing@3".parse::<Strike>().is_err());
    }
}
