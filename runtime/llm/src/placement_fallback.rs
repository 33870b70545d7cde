//! Weights and caches that are not on the device where they should be, because that device rejects
//! them.

use crate::error::{Error, Result};
use samite_sched::Fallback;

/// A weight or a cache that is not on the device that rules or the order of devices require.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementFallback {
    /// Description, such as `tensor 'output.weight' of type q8_0`.
    pub what: String,
    /// Device that rejects it.
    pub wanted: String,
    /// Reason of the device.
    pub reason: String,
    /// Actual device.
    pub device: String,
}

/// Reports displaced weights and caches: one warning for each device and reason, or the first one
/// as an error.
pub(crate) fn report(displaced: &[PlacementFallback], fallback: Fallback) -> Result<()> {
    if fallback == Fallback::Allow {
        return Ok(());
    }
    let mut said: Vec<(&str, &str)> = Vec::new();
    for first in displaced {
        let kind = (&*first.wanted, &*first.reason);
        if said.contains(&kind) {
            continue;
        }
        said.push(kind);
        let of_kind = |other: &&PlacementFallback| (&*other.wanted, &*other.reason) == kind;
        let message = format!(
            "{} belongs on {}, which refuses it: {}{}",
            first.what,
            first.wanted,
            first.reason,
            match displaced.iter().filter(of_kind).count() - 1 {
                0 => String::new(),
                others => format!("; so do {others} more"),
            }
        );
        if fallback == Fallback::Deny {
            return Err(Error::rule(format!(
                "{message}. Place it elsewhere, or allow devices to fall back"
            )));
        }
        tracing::warn!("{message}; it goes to {}", first.device);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn displaced_tensors_are_grouped_by_reason() {
        let displaced = |what: &str, wanted: &str, reason: &str| PlacementFallback {
            what: what.to_owned(),
            wanted: wanted.to_owned(),
            reason: reason.to_owned(),
            device: "cpu".to_owned(),
        };
        let all = [
            displaced("a", "gpu", "too large"),
            displaced("b", "gpu", "of a wrong type"),
            displaced("c", "gpu", "too large"),
            displaced("d", "other", "too large"),
        ];
        let denied = |displaced: &[PlacementFallback]| {
            let error = report(displaced, Fallback::Deny).unwrap_err();
            error.to_string()
        };
        let message = denied(&all);
        assert!(
            message.contains("a belongs on gpu, which refuses it: too large; so do 1 more. "),
            "{message}"
        );
        let message = denied(&all[3..]);
        assert!(
            message.contains("d belongs on other, which refuses it: too large. "),
            "{message}"
        );
        assert!(report(&[], Fallback::Deny).is_ok());
        assert!(report(&all, Fallback::Allow).is_ok());
    }
}
