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
    for (first, others) in by_reason(displaced) {
        let message = format!(
            "{} belongs on {}, which refuses it: {}{others}",
            first.what, first.wanted, first.reason,
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

/// Warns about flash attention that several operations on the same device replace.
pub(crate) fn report_no_flash(layers: &[PlacementFallback], fallback: Fallback) {
    if fallback == Fallback::Allow {
        return;
    }
    for (first, others) in by_reason(layers) {
        tracing::warn!(
            "{} takes several operations on {}, which refuses flash attention: {}{others}",
            first.what,
            first.device,
            first.reason,
        );
    }
}

/// Returns the first fallback of each device and reason, with a remark about the others.
fn by_reason(all: &[PlacementFallback]) -> Vec<(&PlacementFallback, String)> {
    let is_same = |a: &PlacementFallback, b: &PlacementFallback| {
        (&a.wanted, &a.reason) == (&b.wanted, &b.reason)
    };
    let mut found: Vec<(&PlacementFallback, String)> = Vec::new();
    for (index, first) in all.iter().enumerate() {
        if all[..index].iter().any(|other| is_same(other, first)) {
            continue;
        }
        let same = all.iter().filter(|other| is_same(other, first));
        let others = match same.count() - 1 {
            0 => String::new(),
            others => format!("; so do {others} more"),
        };
        found.push((first, others));
    }
    found
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
