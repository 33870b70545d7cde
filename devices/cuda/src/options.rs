//! Options that turn features off, to compare and to test.

use samite_core::{Error, Parameters, Result};

/// Options of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaOptions {
    /// Set to queue every launch by itself, without recorded graphs.
    pub without_graphs: bool,
}

impl CudaOptions {
    /// Returns these options with changes by the parameter `graphs=on|off` of the device called
    /// `device`.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for other parameters or values.
    pub fn with(mut self, device: &str, mut parameters: Parameters) -> Result<Self> {
        match parameters.take("graphs").as_deref() {
            None => {}
            Some("on") => self.without_graphs = false,
            Some("off") => self.without_graphs = true,
            Some(other) => {
                return Err(Error::invalid(format!(
                    "device '{device}': parameter 'graphs' is '{other}', and must be on or off"
                )));
            }
        }
        parameters.finish(device, &["graphs"])?;
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuda_parameters_are_parsed() {
        let with = |text: &str| CudaOptions::default().with("cuda0", text.parse().unwrap());
        assert!(with("graphs=off").unwrap().without_graphs);
        assert_eq!(with("graphs=on").unwrap(), CudaOptions::default());
        for (text, part) in [
            ("graphs=1", "'graphs' is '1'"),
            ("tuning=on", "it has: graphs"),
        ] {
            let error = with(text).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
