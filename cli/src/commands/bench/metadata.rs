//! Describes a measurement: model, processor, date.

use crate::shown::shortened;
use samite::llm::Model;
use samite::registry::{BuiltIn, Registry};
use serde_json::{Value, json};
use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the metadata of every report. Results are added to it.
pub fn metadata() -> Value {
    let registry = Registry::built_in(BuiltIn::default());
    let cpu = registry
        .backends()
        .iter()
        .find(|backend| backend.name() == "cpu");
    let feature = |wanted: &str| {
        let features = cpu?.features().into_iter();
        features
            .into_iter()
            .find_map(|(name, value)| (name == wanted).then_some(value))
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    json!({
        "date": utc(now.map_or(0, |time| time.as_secs())),
        "processor": cpu.and_then(|cpu| cpu.devices().first()).map(|device| device.description()),
        "isa": feature("isa"),
        "cores": samite::registry::allowed_threads(),
        "samite_version": env!("CARGO_PKG_VERSION"),
    })
}

/// Returns a line about a model.
pub fn describe(model: &Model) -> String {
    format!(
        "{} ({:.1} M parameters, {:.1} MB)",
        shortened(model.name(), 40),
        model.n_params() as f64 / 1e6,
        model.file_bytes() as f64 / 1e6
    )
}

/// Formats seconds since 1970 in ISO 8601.
fn utc(seconds: u64) -> String {
    let is_leap =
        |year: u64| year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    let (mut year, mut month, mut day) = (1970, 1, seconds / 86_400);
    loop {
        let days = match month {
            2 => 28 + u64::from(is_leap(year)),
            4 | 6 | 9 | 11 => 30,
            _ => 31,
        };
        if day < days {
            break;
        }
        day -= days;
        (year, month) = (year + month / 12, month % 12 + 1);
    }
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!(
        "{year}-{month:02}-{:02}T{hour:02}:{minute:02}:{second:02}Z",
        day + 1
    )
}

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn dates() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_767_225_599), "2025-12-31T23:59:59Z");
        assert_eq!(utc(1_795_479_372), "2026-11-24T00:16:12Z");
    }
}
