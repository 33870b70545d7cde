//! Device parameters: `key=value,key=value`.

use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// Parameters for the creation of a device. Each device defines its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parameters(Vec<(String, String)>);

impl Parameters {
    /// Returns whether there are no parameters.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a parameter, such as `threads=4`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for text without a key or without `=`, and for a duplicate key.
    pub fn add(&mut self, text: &str) -> Result<()> {
        let (key, value) = match text.split_once('=') {
            Some((key, value)) if !key.trim().is_empty() => (key.trim(), value.trim()),
            _ => {
                return Err(Error::invalid(format!(
                    "'{text}' is not a parameter: write key=value"
                )));
            }
        };
        if self.0.iter().any(|(known, _)| known == key) {
            return Err(Error::invalid(format!("parameter '{key}' is given twice")));
        }
        self.0.push((key.to_owned(), value.to_owned()));
        Ok(())
    }

    /// Removes the value of `key` and returns it.
    pub fn take(&mut self, key: &str) -> Option<String> {
        let at = self.0.iter().position(|(known, _)| known == key)?;
        Some(self.0.remove(at).1)
    }

    /// Removes the value of `key` and returns it as a number from `least` to `most`. `device` is
    /// the device's name.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another value.
    pub fn take_number(
        &mut self,
        device: &str,
        key: &str,
        least: usize,
        most: usize,
    ) -> Result<Option<usize>> {
        let Some(text) = self.take(key) else {
            return Ok(None);
        };
        match text.parse() {
            Ok(number) if (least..=most).contains(&number) => Ok(Some(number)),
            _ => Err(Error::invalid(format!(
                "device '{device}': parameter '{key}' is '{text}', and must be a number from {least} to {most}"
            ))),
        }
    }

    /// Checks that the device has taken all parameters. `device` is its name, `known` are its keys.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], naming one that was not taken.
    pub fn finish(&self, device: &str, known: &[&str]) -> Result<()> {
        let Some((key, _)) = self.0.first() else {
            return Ok(());
        };
        let known = match known {
            [] => "it has none".to_owned(),
            known => format!("it has: {}", known.join(", ")),
        };
        Err(Error::invalid(format!(
            "device '{device}' has no parameter '{key}'; {known}"
        )))
    }
}

impl FromStr for Parameters {
    type Err = Error;

    /// Parses `key=value,key=value`.
    fn from_str(text: &str) -> Result<Self> {
        let mut parameters = Parameters::default();
        for pair in text.split(',').filter(|pair| !pair.trim().is_empty()) {
            parameters.add(pair)?;
        }
        Ok(parameters)
    }
}

impl fmt::Display for Parameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (key, value)) in self.0.iter().enumerate() {
            let comma = if number > 0 { "," } else { "" };
            write!(f, "{comma}{key}={value}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_round_trip_through_text() {
        let text = "threads=4, address=host:80,empty=";
        let mut parameters: Parameters = text.parse().unwrap();
        assert_eq!(parameters.to_string(), "threads=4,address=host:80,empty=");
        assert_eq!(parameters.take("address").as_deref(), Some("host:80"));
        assert_eq!(parameters.take("address"), None);
        assert_eq!(
            parameters.take_number("d", "threads", 1, 4).unwrap(),
            Some(4)
        );
        assert_eq!(parameters.take("empty").as_deref(), Some(""));
        assert!(parameters.is_empty() && parameters.finish("d", &[]).is_ok());
        assert!("".parse::<Parameters>().unwrap().is_empty());
    }

    #[test]
    fn invalid_parameters_are_named() {
        let error = |text: &str| text.parse::<Parameters>().unwrap_err().to_string();
        assert_eq!(error("a=1,b"), "'b' is not a parameter: write key=value");
        assert_eq!(error("=1"), "'=1' is not a parameter: write key=value");
        assert_eq!(error("a=1,a=2"), "parameter 'a' is given twice");
        let mut parameters: Parameters = "threads=5".parse().unwrap();
        let left = parameters.finish("d", &["poll", "strict"]).unwrap_err();
        assert_eq!(
            left.to_string(),
            "device 'd' has no parameter 'threads'; it has: poll, strict"
        );
        let number = parameters.take_number("d", "threads", 1, 4).unwrap_err();
        assert!(number.to_string().contains("'threads' is '5'"), "{number}");
    }
}
