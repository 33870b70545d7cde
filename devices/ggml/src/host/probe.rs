//! Tries a plugin in a separate process.

use super::check::{computes, has_layout};
use super::device::GgmlDevice;
use super::library::Plugin;
use super::trial_cache::TrialCache;
use crate::abi::Version;
use crate::base;
use samite_core::Device;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time limit for a plugin to load and report itself.
const PATIENCE: Duration = Duration::from_secs(20);

/// Time limit for a device to compute a small graph, including everything that its driver compiles.
const TRIAL_PATIENCE: Duration = Duration::from_secs(60);

/// Prefix of every answer of a probe, which distinguishes it from the plugin's own output.
const OK: &str = "samite-probe-ok ";
const REFUSED: &str = "samite-probe-refused ";
const DEVICE: &str = "samite-probe-device ";
const VERDICT: &str = "samite-probe-verdict ";
/// The plugin uses samite's `libggml-base`, so its release is not known.
const ALONE: &str = "samite-probe-alone";

/// Argument before the path: see [`ProbeOptions::load_only`].
pub const LOAD_ONLY: &str = "--load-only";

/// Argument before the path, with `=` and [`ProbeOptions::release`].
pub const RELEASE: &str = "--release";

/// Options of a [`probe`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProbeOptions {
    /// Computes no graph, because the verdicts are known.
    pub load_only: bool,
    /// Release of ggml, such as `0.28`, if the plugin comes without `libggml-base`.
    pub release: Option<String>,
}

/// Performs the work of a [prober](super::GgmlOptions::prober). Loads the plugin at `path` and
/// queries its devices. If the plugin came without `libggml-base`, its devices must compute a few
/// known results. Unless told otherwise, each device then computes a small graph. Passes each
/// result as a line to `say`; the program must print it to its standard output at once, because
/// later steps may end the process.
pub fn probe(path: &Path, options: &ProbeOptions, say: &mut dyn FnMut(&str)) {
    let release = options.release.as_deref().map(Version::of_release);
    let devices = match release.transpose() {
        Ok(release) => try_out(path, release, say),
        Err(unknown) => Err(unknown.to_string()),
    };
    let devices = match devices {
        Ok((score, devices)) => {
            say(&format!("{OK}{score}"));
            devices
        }
        Err(reason) => return say(&format!("{REFUSED}{}", one_line(&reason))),
    };
    for device in &devices {
        say(&format!("{DEVICE}{}", device.identity()));
    }
    for (number, device) in devices
        .into_iter()
        .enumerate()
        .filter(|_| !options.load_only)
    {
        let reason = super::trial::run(&(device as Arc<dyn Device>)).err();
        let reason = reason.unwrap_or_default();
        say(&format!("{VERDICT}{number} {}", one_line(&reason)));
    }
}

fn one_line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}

fn try_out(
    path: &Path,
    release: Option<Version>,
    say: &mut dyn FnMut(&str),
) -> Result<(i32, Vec<Arc<GgmlDevice>>), String> {
    let plugin = Plugin::load(path, release);
    if base::is_serving() {
        say(ALONE);
    }
    let plugin = Arc::new(plugin?);
    let mut devices = Vec::new();
    for &raw in &plugin.devices {
        // A device with invalid memory is also left out when the plugin is used.
        let device = match GgmlDevice::new(Arc::clone(&plugin), raw, Some(1), |_| false) {
            Ok(device) => device,
            Err(reason) if plugin.alone => return Err(reason),
            Err(_) => continue,
        };
        if plugin.alone {
            has_layout(&device)?;
            computes(&(Arc::clone(&device) as Arc<dyn Device>))?;
        }
        devices.push(device);
    }
    Ok((plugin.score, devices))
}

/// Result of trying a plugin in another process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeResult {
    pub score: i32,
    /// Release as which the plugin works, if it comes without `libggml-base`.
    pub release: Option<Version>,
    /// Identity of each device, with its failure, or `None` if it computed a small graph.
    pub devices: Vec<(String, Option<String>)>,
}

/// Tries the plugin at `path` in another process.
///
/// # Errors
/// Returns the reason why it cannot be used, or how the process ended.
pub fn ask(prober: &[OsString], path: &Path) -> Result<ProbeResult, String> {
    ask_with(prober, path, TrialCache::for_plugin(path), TRIAL_PATIENCE)
}

fn ask_with(
    prober: &[OsString],
    path: &Path,
    trial_cache: Option<TrialCache>,
    patience: Duration,
) -> Result<ProbeResult, String> {
    if let Some((release, known)) = trial_cache.as_ref().and_then(TrialCache::read) {
        let answer = start(prober, path, true, release, patience);
        let (answer, _) = answer.map_err(|error| error.reason)?;
        let verdict = |(identity, _): &(String, _)| {
            let known = known.iter().find(|(device, _)| device == identity)?;
            Some(known.clone())
        };
        let devices: Option<Vec<_>> = answer.devices.iter().map(verdict).collect();
        if let Some(devices) = devices {
            let score = answer.score;
            return Ok(ProbeResult {
                score,
                release,
                devices,
            });
        }
    }
    let (answer, end) = try_releases(prober, path, patience)?;
    // A timeout may be the machine's fault, so try again next time.
    if let (Some(trial_cache), End::Exit(_)) = (trial_cache, end) {
        trial_cache.write(answer.release, &answer.devices);
    }
    Ok(answer)
}

/// Tries the plugin, as one of each release if it does not say its own. The newest release that
/// works is taken.
fn try_releases(
    prober: &[OsString],
    path: &Path,
    patience: Duration,
) -> Result<(ProbeResult, End), String> {
    let reason = match start(prober, path, false, None, patience) {
        Err(error) if error.is_alone => error.reason,
        Err(error) => return Err(error.reason),
        Ok(answer) => return Ok(answer),
    };
    let newer = Version::ALL.into_iter().skip(1).rev();
    for release in newer {
        match start(prober, path, false, Some(release), patience) {
            Ok(answer) => return Ok(answer),
            // It does not depend on the release.
            Err(error) if error.reason == reason => return Err(reason),
            Err(_) => {}
        }
    }
    Err(format!(
        "it comes without libggml-base and works as no known release of ggml: {reason}"
    ))
}

/// Failure of a probe.
#[derive(Debug)]
struct ProbeError {
    reason: String,
    /// True if the plugin comes without `libggml-base`, and so may be of another release.
    is_alone: bool,
}

impl From<String> for ProbeError {
    fn from(reason: String) -> Self {
        ProbeError {
            reason,
            is_alone: false,
        }
    }
}

impl From<&str> for ProbeError {
    fn from(reason: &str) -> Self {
        reason.to_owned().into()
    }
}

fn start(
    prober: &[OsString],
    path: &Path,
    load_only: bool,
    release: Option<Version>,
    patience: Duration,
) -> Result<(ProbeResult, End), ProbeError> {
    let (program, arguments) = prober.split_first().ok_or("there is no prober")?;
    let mut child = Command::new(program)
        .args(arguments)
        .args(load_only.then_some(LOAD_ONLY))
        .args(release.map(|release| format!("{RELEASE}={release}")))
        .arg(path)
        // When ggml aborts, it would start a debugger for a backtrace.
        .env("GGML_NO_BACKTRACE", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("the probe did not start: {error}"))?;
    let lines: Arc<Mutex<Vec<String>>> = Arc::default();
    let reader = child.stdout.take().map(|pipe| {
        let lines = Arc::clone(&lines);
        samite_core::thread_builder()?.spawn(move || {
            // A plugin may print anything.
            for line in BufReader::new(pipe)
                .split(b'\n')
                .map_while(|line| line.ok())
            {
                let line = String::from_utf8_lossy(&line).into_owned();
                lines
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(line);
            }
        })
    });
    let reader = match reader.transpose() {
        Ok(reader) => reader,
        Err(error) => {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("no thread reads the probe: {error}").into());
        }
    };
    let said = || lines.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let is_loaded = || said().iter().any(|line| line.starts_with(OK));
    let end = wait(&mut child, is_loaded, patience)?;
    if let (Some(reader), End::Exit(_)) = (reader, &end) {
        // The reader ends with the pipe. Ignore a panic.
        let _ = reader.join();
    }
    let release = release.unwrap_or(Version::V25);
    Ok((understand(&said(), &end, release)?, end))
}

/// The end of a probe.
enum End {
    Exit(ExitStatus),
    /// The process was killed after this time.
    Late(Duration),
}

/// Interprets a probe's lines and its end. A plugin alone was taken for one of `release`.
fn understand(lines: &[String], end: &End, release: Version) -> Result<ProbeResult, ProbeError> {
    let is_alone = lines.iter().any(|line| line == ALONE);
    let failed = |reason| ProbeError { reason, is_alone };
    let begins = |start: &str| {
        let rests = lines
            .iter()
            .filter_map(move |line| line.strip_prefix(start));
        rests.map(str::to_owned).collect::<Vec<_>>()
    };
    if let Some(reason) = begins(REFUSED).pop() {
        return Err(failed(reason));
    }
    let Some(score) = begins(OK).pop() else {
        return Err(failed(how_it_ended(end)));
    };
    let score = score.trim().parse();
    let score = score.map_err(|_| "the probe's answer makes no sense")?;
    let ended = match end {
        End::Exit(status) if status.success() => None,
        end => Some(how_it_ended(end)),
    };
    // A verdict counts only if the process ended normally, because any device may have ended it.
    let untried = ended.unwrap_or_default();
    let mut devices: Vec<_> = begins(DEVICE)
        .into_iter()
        .map(|identity| {
            (
                identity,
                Some(untried.clone()).filter(|reason| !reason.is_empty()),
            )
        })
        .collect();
    for verdict in begins(VERDICT) {
        let (number, reason) = verdict.split_once(' ').unwrap_or((&verdict, ""));
        let number = number.parse::<usize>().ok();
        if let Some((_, doubt)) = number.and_then(|number| devices.get_mut(number))
            && !reason.is_empty()
        {
            *doubt = Some(reason.to_owned());
        }
    }
    Ok(ProbeResult {
        score,
        release: is_alone.then_some(release),
        devices,
    })
}

/// Waits for the process, for at most `patience` after it has loaded the plugin.
fn wait(
    child: &mut Child,
    is_loaded: impl Fn() -> bool,
    patience: Duration,
) -> Result<End, String> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().map_err(|error| error.to_string())? {
            return Ok(End::Exit(status));
        }
        let waited = start.elapsed();
        if waited > patience || (waited > PATIENCE && !is_loaded()) {
            // It may end at this moment. Either way it is gone afterwards.
            let _ = child.kill();
            let _ = child.wait();
            return Ok(End::Late(waited));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn how_it_ended(end: &End) -> String {
    let status = match end {
        End::Exit(status) => status,
        End::Late(waited) => {
            return format!("it did not answer within {} seconds", waited.as_secs());
        }
    };
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(status) {
        return format!("it killed the process that tried it (signal {signal})");
    }
    format!("the process that tried it ended without an answer ({status})")
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn shell(script: &str) -> Vec<OsString> {
        ["/bin/sh", "-c", script].map(Into::into).into()
    }

    #[test]
    fn probe_answers_are_parsed() {
        let path = Path::new("/x.so");
        let ask = |script: &str| ask(&shell(script), path);
        let answer = |score, devices: &[(&str, Option<&str>)]| {
            let owned = |&(identity, doubt): &(&str, Option<&str>)| {
                (identity.to_owned(), doubt.map(str::to_owned))
            };
            let devices = devices.iter().map(owned).collect();
            Ok(ProbeResult {
                score,
                release: None,
                devices,
            })
        };
        assert_eq!(ask("echo noise; echo samite-probe-ok 64"), answer(64, &[]));
        assert_eq!(
            ask("echo samite-probe-refused score 0"),
            Err("score 0".into())
        );
        let error = ask("kill -ABRT $$").unwrap_err();
        assert!(error.contains("signal 6"), "{error}");
        assert!(ask("exit 3").unwrap_err().contains("without an answer"));
        assert!(
            ask("echo samite-probe-ok x")
                .unwrap_err()
                .contains("no sense")
        );
        let missing = super::ask(&["/does/not/exist".into()], path).unwrap_err();
        assert!(missing.contains("did not start"), "{missing}");

        let two =
            "echo samite-probe-ok 1; echo samite-probe-device a; echo samite-probe-device b c;";
        let with = |rest: &str| ask(&format!("{two} {rest}"));
        let right = "echo samite-probe-verdict 0; echo samite-probe-verdict 1 it is wrong";
        assert_eq!(
            with(right),
            answer(1, &[("a", None), ("b c", Some("it is wrong"))])
        );
        // A device that ends the process leaves the others without a verdict, and a process must
        // exit.
        let killed = "it killed the process that tried it (signal 11)";
        let all = answer(1, &[("a", Some(killed)), ("b c", Some(killed))]);
        assert_eq!(with("echo samite-probe-verdict 0; kill -SEGV $$"), all);
    }

    #[test]
    fn cached_verdicts_are_per_device_and_skip_the_trial() {
        let folder = tempfile::tempdir().unwrap();
        let plugin = folder.path().join("x.so");
        std::fs::write(&plugin, "1").unwrap();
        // Shells call their first argument `$0`.
        let ask = |devices: &str, trial: &str| {
            let script = format!(
                "echo samite-probe-ok 1; for d in {devices}; do echo samite-probe-device $d; done; [ $0 = {LOAD_ONLY} ] || {{ {trial}; }}"
            );
            let trial_cache = TrialCache::in_folder(&folder.path().join("kept"), &plugin);
            let patience = Duration::from_millis(1500);
            let answer = ask_with(&shell(&script), &plugin, trial_cache, patience).unwrap();
            let devices = answer.devices.into_iter();
            let devices = devices.map(|(identity, doubt)| identity + &doubt.unwrap_or_default());
            devices.collect::<Vec<_>>()
        };
        assert_eq!(ask("a b", "echo samite-probe-verdict 1 !"), ["a", "b!"]);
        // A trial would reject it.
        assert_eq!(ask("b a", "echo samite-probe-refused tried"), ["b!", "a"]);
        // A new device needs a trial.
        assert_eq!(ask("a c", "echo samite-probe-verdict 1 ?"), ["a", "c?"]);
        // A trial that timed out is repeated.
        let late = "it did not answer within 1 seconds";
        let slow = ask("d", "exec sleep 20");
        assert_eq!(slow, [format!("d{late}")]);
        assert_eq!(ask("d", "echo samite-probe-verdict 0"), ["d"]);
    }

    #[test]
    fn a_plugin_alone_is_tried_as_each_release() {
        let folder = tempfile::tempdir().unwrap();
        let plugin = folder.path().join("x.so");
        std::fs::write(&plugin, "1").unwrap();
        // Shells call their first argument `$0`.
        let ask = |works: &str, kept: &str| {
            let script = format!(
                "echo samite-probe-alone; echo $0 $1 $2 >> {}/asked; \
                 case \"$0 $1 $2\" in \
                 *{works}*) echo samite-probe-ok 1; echo samite-probe-device a;; \
                 *) echo samite-probe-refused no $1; \
                 esac",
                folder.path().display()
            );
            let trial_cache = TrialCache::in_folder(&folder.path().join(kept), &plugin);
            ask_with(&shell(&script), &plugin, trial_cache, TRIAL_PATIENCE)
        };
        let asked = || {
            let path = folder.path().join("asked");
            let asked = std::fs::read_to_string(&path).unwrap();
            std::fs::remove_file(path).unwrap();
            asked.lines().count()
        };
        let answer = ask("0.27", "kept").unwrap();
        assert_eq!((answer.release, asked()), (Some(Version::V27), 3));
        let answer = ask("'--load-only --release=0.27'", "kept").unwrap();
        assert_eq!((answer.release, asked()), (Some(Version::V27), 1));
        let first = ask("x.so", "others").unwrap();
        assert_eq!((first.release, asked()), (Some(Version::V25), 1));
        let error = ask("nothing", "others again").unwrap_err();
        assert!(error.contains("no known release of ggml: no"), "{error}");
        assert_eq!(asked(), 4);
        // The reason is the same for another release.
        let same = "echo samite-probe-alone; echo samite-probe-refused score 0";
        let error = ask_with(&shell(same), &plugin, None, TRIAL_PATIENCE).unwrap_err();
        assert_eq!(error, "score 0");
    }

    #[test]
    fn failed_probes_report_the_reason() {
        let mut lines = Vec::new();
        let mut keep = |line: &str| lines.push(line.to_owned());
        let missing = Path::new("/does/not/exist.so");
        probe(missing, &ProbeOptions::default(), &mut keep);
        let unknown = ProbeOptions {
            release: Some("0.99".into()),
            ..ProbeOptions::default()
        };
        probe(missing, &unknown, &mut keep);
        assert!(lines.pop().is_some_and(|line| line.contains("ggml 0.99")));
        assert!(
            lines.len() == 1 && lines[0].starts_with(REFUSED),
            "{lines:?}"
        );
    }
}
