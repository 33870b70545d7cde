//! Trying a plugin in a process of its own.

use super::check::computes;
use super::device::GgmlDevice;
use super::library::Plugin;
use samite_core::Device;
use std::ffi::OsString;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A plugin that needs longer than this to say what it is, is refused.
const PATIENCE: Duration = Duration::from_secs(20);

/// Starts every answer of a probe, so that a plugin's own output does not count.
const OK: &str = "samite-probe-ok ";
const REFUSED: &str = "samite-probe-refused ";

/// What a [prober](super::GgmlOptions::prober) does: loads the plugin at `path`, asks its devices who they are, lets those of a
/// plugin that came without `libggml-base` compute a little, and returns one line, which the program prints to its standard
/// output.
pub fn probe(path: &Path) -> String {
    match try_out(path) {
        Ok(score) => format!("{OK}{score}"),
        Err(reason) => format!("{REFUSED}{}", reason.replace('\n', " ")),
    }
}

fn try_out(path: &Path) -> Result<i32, String> {
    let plugin = Arc::new(Plugin::load(path)?);
    for &raw in &plugin.devices {
        // SAFETY: loading checked that the function is there; the device belongs to the loaded plugin.
        unsafe {
            let mut props = crate::abi::DevProps::zeroed();
            if let Some(get_props) = (*raw).iface.get_props {
                get_props(raw, &raw mut props);
            }
        }
        if plugin.alone {
            let device = GgmlDevice::new(Arc::clone(&plugin), raw, Some(1), |_| false)?;
            computes(&(device as Arc<dyn Device>))?;
        }
    }
    Ok(plugin.score)
}

/// The score of the plugin at `path`, found out by another process.
///
/// # Errors
/// Why it cannot be used, or how the process ended.
pub fn ask(prober: &[OsString], path: &Path) -> Result<i32, String> {
    let (program, arguments) = prober.split_first().ok_or("there is no prober")?;
    let mut child = Command::new(program)
        .args(arguments)
        .arg(path)
        // ggml starts a debugger for a backtrace when it aborts.
        .env("GGML_NO_BACKTRACE", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("the probe did not start: {error}"))?;
    let status = wait(&mut child)?;
    let mut output = String::new();
    if let Some(mut pipe) = child.stdout.take() {
        // A plugin may print anything.
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut pipe, &mut bytes).map_err(|error| error.to_string())?;
        output = String::from_utf8_lossy(&bytes).into_owned();
    }
    for line in output.lines() {
        if let Some(reason) = line.strip_prefix(REFUSED) {
            return Err(reason.to_owned());
        }
        if let Some(score) = line.strip_prefix(OK)
            && status.success()
        {
            return score
                .trim()
                .parse()
                .map_err(|_| "the probe's answer makes no sense".into());
        }
    }
    Err(how_it_ended(status))
}

fn wait(child: &mut Child) -> Result<ExitStatus, String> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().map_err(|error| error.to_string())? {
            return Ok(status);
        }
        if start.elapsed() > PATIENCE {
            // It may end at this moment; either way it is gone afterwards.
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!(
                "it did not answer within {} seconds",
                PATIENCE.as_secs()
            ));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn how_it_ended(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match status.signal() {
        Some(signal) => format!("it killed the process that tried it (signal {signal})"),
        None => format!("the process that tried it ended without an answer ({status})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Vec<OsString> {
        ["/bin/sh", "-c", script].map(Into::into).into()
    }

    #[test]
    fn answers_are_understood() {
        let path = Path::new("/x.so");
        let ask = |script: &str| ask(&shell(script), path);
        assert_eq!(ask("echo noise; echo samite-probe-ok 64"), Ok(64));
        assert_eq!(
            ask("echo samite-probe-refused score 0"),
            Err("score 0".into())
        );
        let error = ask("kill -ABRT $$").unwrap_err();
        assert!(error.contains("signal 6"), "{error}");
        let error = ask("echo samite-probe-ok 1; kill -SEGV $$").unwrap_err();
        assert!(error.contains("signal 11"), "it also has to exit: {error}");
        assert!(ask("exit 3").unwrap_err().contains("without an answer"));
        assert!(
            ask("echo samite-probe-ok x")
                .unwrap_err()
                .contains("no sense")
        );
        let missing = super::ask(&["/does/not/exist".into()], path).unwrap_err();
        assert!(missing.contains("did not start"), "{missing}");
    }

    #[test]
    fn a_probe_says_why() {
        let line = probe(Path::new("/does/not/exist.so"));
        assert!(line.starts_with(REFUSED), "{line}");
    }
}
