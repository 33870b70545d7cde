//! Placement rules, with which users place tensors on devices.

use crate::error::{Error, Result};
use fancy_regex::Regex;
use samite_core::DeviceKind;
use samite_sched::DeviceSet;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// One placement rule. Later rules take precedence over earlier ones.
///
/// As text, a rule is `selector:device`. A `;` separates several rules:
///
/// | selector | means |
/// |---|---|
/// | `layers=2-5`, `layers=4-`, `layers=7` | these layers with their part of the KV cache |
/// | `embedding` | the token embedding |
/// | `output` | the last norm and the output matrix |
/// | `kv`, `kv=0-3` | the KV cache of all or these layers, with the attention itself |
/// | anything else | tensors by name; `*` stands for any characters, `?` for one |
#[derive(Clone, Debug)]
pub enum PlacementRule {
    /// Places the selected tensors and caches on the device with this name.
    Place {
        /// Selected tensors and caches.
        selector: Selector,
        /// Name of the device.
        device: String,
    },
    /// Only the last layers, where the output counts as one more, go to devices other than the last
    /// one (llama.cpp's `-ngl`). Every `Place` takes precedence.
    LastLayers(usize),
    /// Layers are divided over the devices before the last one in these proportions (llama.cpp's
    /// `-ts`). Every `Place` takes precedence.
    Split(Vec<f32>),
}

/// Tensors or caches that a [`PlacementRule`] selects.
#[derive(Clone, Debug)]
pub enum Selector {
    /// Layers with all of their tensors and caches.
    Layers(RangeInclusive<usize>),
    /// The token embedding.
    Embedding,
    /// The last norm and the output matrix.
    Output,
    /// The KV cache of some layers.
    Kv(RangeInclusive<usize>),
    /// Tensors with a match of the expression in their names.
    Names {
        /// Text from the user: the expression itself, or a pattern with `*` and `?`.
        text: String,
        /// Compiled expression.
        regex: Box<Regex>,
    },
}

impl PlacementRule {
    /// Returns whether the rule places whole layers.
    pub(crate) fn is_about_layers(&self) -> bool {
        match self {
            PlacementRule::LastLayers(_) | PlacementRule::Split(_) => true,
            PlacementRule::Place { selector, .. } => matches!(selector, Selector::Layers(_)),
        }
    }

    /// Parses rules that are separated by `;`.
    ///
    /// # Errors
    /// Returns [`Error::Rule`] with the part that cannot be parsed.
    pub fn parse_all(text: &str) -> Result<Vec<Self>> {
        let parts = text.split(';').map(str::trim);
        parts
            .filter(|part| !part.is_empty())
            .map(str::parse)
            .collect()
    }

    /// Parses llama.cpp's `-ot`: `regular expression=device`, with commas between several.
    ///
    /// # Errors
    /// Returns [`Error::Rule`] with the part that cannot be parsed.
    pub fn parse_overrides(text: &str) -> Result<Vec<Self>> {
        let parse = |part: &str| {
            let (pattern, device) = part.rsplit_once('=').ok_or_else(|| {
                Error::rule(format!("override '{part}': write it as expression=device"))
            })?;
            Self::of_names(pattern, device.trim())
        };
        let parts = text.split(',').map(str::trim);
        parts.filter(|part| !part.is_empty()).map(parse).collect()
    }

    /// Creates a rule that places tensors whose names match an expression.
    ///
    /// # Errors
    /// Returns [`Error::Rule`] if the expression cannot be parsed.
    pub fn of_names(expression: &str, device: &str) -> Result<Self> {
        let regex = Regex::new(expression)
            .map_err(|error| Error::rule(format!("override '{expression}={device}': {error}")))?;
        Ok(PlacementRule::Place {
            selector: Selector::Names {
                text: expression.to_owned(),
                regex: Box::new(regex),
            },
            device: device.to_owned(),
        })
    }

    /// Parses llama.cpp's `-ts`: proportions that are separated by commas or slashes.
    ///
    /// # Errors
    /// Returns [`Error::Rule`] if a part is not a number or is negative, or if all are 0.
    pub fn parse_split(text: &str) -> Result<Self> {
        let wrong = |why: &str| Error::rule(format!("tensor split '{text}': {why}"));
        let parts = text.split([',', '/']).map(|part| part.trim().parse());
        let parts: Vec<f32> = parts
            .collect::<Result<_, _>>()
            .map_err(|_| wrong("write it as numbers with commas between them, such as 3,1"))?;
        if parts.iter().any(|&part| part < 0.0 || !part.is_finite()) {
            return Err(wrong("parts must be finite and not negative"));
        }
        if parts.iter().sum::<f32>() <= 0.0 {
            return Err(wrong("all parts are 0"));
        }
        Ok(PlacementRule::Split(parts))
    }
}

impl FromStr for PlacementRule {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let Some((selector, device)) = text.split_once(':') else {
            return Err(Error::rule(format!(
                "placement rule '{text}': write it as selector:device, such as layers=0-3:cpu"
            )));
        };
        let (selector, device) = (selector.trim(), device.trim());
        if selector.is_empty() || device.is_empty() {
            return Err(Error::rule(format!(
                "placement rule '{text}': the selector or the device is missing"
            )));
        }
        let range = |range: &str| {
            parse_range(range).ok_or_else(|| {
                Error::rule(format!(
                    "placement rule '{text}': '{range}' is no range of layers; write 3, 0-3 or 4-"
                ))
            })
        };
        let selector = match (selector, selector.split_once('=')) {
            ("embedding", _) => Selector::Embedding,
            ("output", _) => Selector::Output,
            ("kv", _) => Selector::Kv(0..=usize::MAX),
            (_, Some(("layers", layers))) => Selector::Layers(range(layers)?),
            (_, Some(("kv", layers))) => Selector::Kv(range(layers)?),
            _ => Selector::Names {
                text: selector.to_owned(),
                regex: Box::new(glob(selector)?),
            },
        };
        Ok(PlacementRule::Place {
            selector,
            device: device.to_owned(),
        })
    }
}

fn parse_range(text: &str) -> Option<RangeInclusive<usize>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let first = first.trim().parse().ok()?;
    let last = match last.trim() {
        "" => usize::MAX,
        last => last.parse().ok()?,
    };
    (first <= last).then_some(first..=last)
}

/// Compiles a pattern for whole names, in which `*` matches any characters and `?` matches one.
pub(crate) fn glob(pattern: &str) -> Result<Regex> {
    let mut expression = String::from(r"(?s)\A");
    for c in pattern.chars() {
        match c {
            '*' => expression.push_str(".*"),
            '?' => expression.push('.'),
            c => expression.push_str(&fancy_regex::escape(c.encode_utf8(&mut [0; 4]))),
        }
    }
    expression.push_str(r"\z");
    Regex::new(&expression).map_err(|error| Error::rule(format!("pattern '{pattern}': {error}")))
}

/// Part of the model that a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The token embedding.
    Embedding,
    /// The last norm and the output matrix.
    Output,
    /// Layer with this index.
    Layer(usize),
}

/// Device of one tensor, by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub device: usize,
    /// True if a rule selected this tensor, so that operations on it must run there as well.
    pub explicit: bool,
}

/// Devices for all tensors and the KV cache.
#[derive(Clone, Debug)]
pub(crate) struct Placement {
    /// Choices in the order of the tensors.
    pub tensors: Vec<Choice>,
    /// Choices by layer.
    pub kv: Vec<Choice>,
}

/// Applies `rules` to the tensors of a model, given by name and role.
///
/// Without rules, everything goes to the first device that is not an accelerator, except the
/// embedding, which goes to the last device. If `base` is set, it contains the devices of the
/// layers and, as its last element, of the output.
pub(crate) fn resolve(
    rules: &[PlacementRule],
    base: Option<&[usize]>,
    devices: &DeviceSet,
    n_layer: usize,
    tensors: &[(&str, Role)],
) -> Result<Placement> {
    let host = devices.last();
    let base = match base {
        Some(base) => base.to_vec(),
        None => base_placement(rules, devices, n_layer)?,
    };
    let base_of = |role| match role {
        Role::Embedding => host,
        Role::Output => base[n_layer],
        Role::Layer(il) => base[il],
    };
    let chosen = |device| Choice {
        device,
        explicit: false,
    };
    let mut placement = Placement {
        tensors: tensors
            .iter()
            .map(|&(_, role)| chosen(base_of(role)))
            .collect(),
        kv: base[..n_layer].iter().copied().map(chosen).collect(),
    };
    for rule in rules {
        let PlacementRule::Place { selector, device } = rule else {
            continue;
        };
        let number = devices.position(device).ok_or_else(|| {
            Error::rule(format!(
                "placement rule for device '{device}': it is not among the devices in use: {}; add it to them",
                devices.names()
            ))
        })?;
        let choice = Choice {
            device: number,
            explicit: true,
        };
        let mut matched = false;
        for (&(name, role), tensor) in tensors.iter().zip(&mut placement.tensors) {
            if selector.matches(name, role)? {
                *tensor = choice;
                matched = true;
            }
        }
        if let Selector::Layers(range) | Selector::Kv(range) = selector {
            for kv in placement
                .kv
                .iter_mut()
                .enumerate()
                .filter(|(il, _)| range.contains(il))
            {
                *kv.1 = choice;
                matched = true;
            }
        }
        if !matched {
            return Err(Error::rule(format!(
                "placement rule '{selector}:{device}' matches nothing in this model of {n_layer} layers"
            )));
        }
    }
    // Accelerators have no memory of their own: the host writes caches.
    for kv in &mut placement.kv {
        if devices.get(kv.device).kind() == DeviceKind::Accelerator {
            *kv = chosen(host);
        }
    }
    Ok(placement)
}

/// Returns the devices that layers are divided over, by index: all except the host and
/// accelerators.
pub(crate) fn fast_devices(devices: &DeviceSet) -> Vec<usize> {
    (0..devices.last())
        .filter(|&d| devices.get(d).kind() != DeviceKind::Accelerator)
        .collect()
}

/// Returns the device of each layer and, as the last element, of the output, before any
/// [`PlacementRule::Place`].
fn base_placement(
    rules: &[PlacementRule],
    devices: &DeviceSet,
    n_layer: usize,
) -> Result<Vec<usize>> {
    let host = devices.last();
    let fast = fast_devices(devices);
    let find = |pick: fn(&PlacementRule) -> bool| rules.iter().rev().find(|rule| pick(rule));
    let moved = match find(|rule| matches!(rule, PlacementRule::LastLayers(_))) {
        Some(PlacementRule::LastLayers(count)) => (*count).min(n_layer + 1),
        _ => n_layer + 1,
    };
    let parts = match find(|rule| matches!(rule, PlacementRule::Split(_))) {
        Some(PlacementRule::Split(parts)) => {
            if parts.len() > fast.len() {
                return Err(Error::rule(format!(
                    "tensor split with {} parts: there are {} devices to split over ({}; the last is the host)",
                    parts.len(),
                    fast.len(),
                    devices.names()
                )));
            }
            parts.as_slice()
        }
        _ => &[1.0],
    };
    let mut base = vec![host; n_layer + 1];
    let total: f32 = parts.iter().sum();
    for (i, device) in base[n_layer + 1 - moved..].iter_mut().enumerate() {
        let share = i as f32 / moved as f32 * total;
        let mut end = 0.0;
        let part = parts.iter().position(|part| {
            end += part;
            share < end
        });
        *device = fast
            .get(part.unwrap_or(parts.len() - 1))
            .copied()
            .unwrap_or(host);
    }
    Ok(base)
}

impl Selector {
    /// Returns whether a tensor is selected. [`Selector::Kv`] selects no tensor of the file.
    fn matches(&self, name: &str, role: Role) -> Result<bool> {
        Ok(match self {
            Selector::Layers(range) => matches!(role, Role::Layer(il) if range.contains(&il)),
            Selector::Embedding => role == Role::Embedding,
            Selector::Output => role == Role::Output,
            Selector::Kv(_) => false,
            Selector::Names { text, regex } => regex
                .is_match(name)
                .map_err(|error| Error::rule(format!("placement rule for '{text}': {error}")))?,
        })
    }
}

impl std::fmt::Display for Selector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let range =
            |f: &mut std::fmt::Formatter<'_>, range: &RangeInclusive<usize>| match *range.end() {
                usize::MAX => write!(f, "{}-", range.start()),
                end => write!(f, "{}-{end}", range.start()),
            };
        match self {
            Selector::Layers(layers) => f.write_str("layers=").and_then(|()| range(f, layers)),
            Selector::Kv(layers) => f.write_str("kv=").and_then(|()| range(f, layers)),
            Selector::Embedding => f.write_str("embedding"),
            Selector::Output => f.write_str("output"),
            Selector::Names { text, .. } => f.write_str(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::FakeDevice;

    const TENSORS: [(&str, Role); 5] = [
        ("token_embd.weight", Role::Embedding),
        ("blk.0.ffn_up.weight", Role::Layer(0)),
        ("blk.1.ffn_up.weight", Role::Layer(1)),
        ("blk.2.ffn_up_exps.weight", Role::Layer(2)),
        ("output.weight", Role::Output),
    ];

    fn place(rules: &[PlacementRule]) -> Result<(Vec<usize>, Vec<usize>)> {
        let devices = DeviceSet::new(vec![
            FakeDevice::device("blas", DeviceKind::Accelerator),
            FakeDevice::device("gpu0", DeviceKind::Gpu),
            FakeDevice::device("gpu1", DeviceKind::Gpu),
            FakeDevice::device("cpu", DeviceKind::Cpu),
        ])?;
        let placement = resolve(rules, None, &devices, 3, &TENSORS)?;
        let numbers = |choices: Vec<Choice>| choices.iter().map(|c| c.device).collect();
        Ok((numbers(placement.tensors), numbers(placement.kv)))
    }

    fn parsed(text: &str) -> Result<(Vec<usize>, Vec<usize>)> {
        place(&PlacementRule::parse_all(text)?)
    }

    #[test]
    fn later_rules_win() {
        assert_eq!(parsed("").unwrap(), (vec![3, 1, 1, 1, 1], vec![1, 1, 1]));
        assert_eq!(
            parsed("layers=1-:gpu1; layers=2:cpu; output:blas").unwrap(),
            (vec![3, 1, 2, 3, 0], vec![1, 2, 3])
        );
        assert_eq!(
            parsed("*_exps*:cpu;embedding:gpu0").unwrap(),
            (vec![1, 1, 1, 3, 1], vec![1, 1, 1])
        );
        assert_eq!(
            parsed("layers=0-1:gpu1;kv=1-:cpu").unwrap(),
            (vec![3, 2, 2, 1, 1], vec![2, 3, 3])
        );
        // The cache of an accelerator goes to the host.
        assert_eq!(
            parsed("layers=0:blas").unwrap(),
            (vec![3, 0, 1, 1, 1], vec![3, 1, 1])
        );
    }

    #[test]
    fn llama_cpp_aliases_become_rules() {
        let last = PlacementRule::LastLayers;
        assert_eq!(place(&[last(0)]).unwrap().0, [3, 3, 3, 3, 3]);
        assert_eq!(place(&[last(1)]).unwrap().0, [3, 3, 3, 3, 1]);
        assert_eq!(
            place(&[last(2)]).unwrap(),
            (vec![3, 3, 3, 1, 1], vec![3, 3, 1])
        );
        assert_eq!(place(&[last(99)]).unwrap().0, [3, 1, 1, 1, 1]);
        let split = |text| PlacementRule::parse_split(text).unwrap();
        assert_eq!(place(&[split("1,1")]).unwrap().0, [3, 1, 1, 2, 2]);
        assert_eq!(place(&[split("0,1")]).unwrap().0, [3, 2, 2, 2, 2]);
        assert_eq!(place(&[split("3/1"), last(2)]).unwrap().0, [3, 3, 3, 1, 1]);
        let rules = PlacementRule::parse_overrides(r"blk\.[12]\..*=cpu,^output=gpu1").unwrap();
        assert_eq!(place(&rules).unwrap(), (vec![3, 1, 3, 3, 2], vec![1, 1, 1]));
    }

    #[test]
    fn invalid_rules_are_named() {
        for (text, expected) in [
            ("layers=0-3", "selector:device"),
            ("layers=3-1:cpu", "'3-1' is no range"),
            ("layers=x:cpu", "'x' is no range"),
            (":cpu", "missing"),
            (
                "output:tpu",
                "among the devices in use: blas, gpu0, gpu1, cpu",
            ),
            ("layers=7-9:cpu", "'layers=7-9:cpu' matches nothing"),
            ("kv=3-:cpu", "'kv=3-:cpu' matches nothing"),
            ("*.bias:cpu", "'*.bias:cpu' matches nothing"),
        ] {
            let message = parsed(text).unwrap_err().to_string();
            assert!(message.contains(expected), "{text}: {message}");
        }
        for text in ["1,x", "-1,2", "0,0", "", "inf"] {
            assert!(PlacementRule::parse_split(text).is_err(), "{text}");
        }
        assert!(place(&[PlacementRule::Split(vec![1.0; 3])]).is_err());
        assert!(PlacementRule::parse_overrides("(=cpu").is_err());
        assert!(PlacementRule::parse_overrides("ffn").is_err());
    }

    #[test]
    fn wildcards_match_names() {
        for (pattern, names, others) in [
            ("*", &["", "a.b"][..], &[][..]),
            ("a?c*", &["abc", "a.c.d"], &["ac", "xabc", "ab"]),
            (
                "*_exps.*",
                &["blk.2.up_exps.weight"],
                &["blk.2.up_expsxweight"],
            ),
            ("a+[b]|c", &["a+[b]|c"], &["aab", "c", "a+[b]|cd"]),
            ("b*b", &["bb", "b\nb", "bäb"], &["b", "bba"]),
        ] {
            let matches = |name: &&str| glob(pattern).unwrap().is_match(name).unwrap();
            assert!(names.iter().all(matches), "{pattern}");
            assert!(!others.iter().any(matches), "{pattern}");
        }
        // Matching time does not explode.
        let stars = glob(&("a*".repeat(50) + "c")).unwrap();
        assert!(!stars.is_match(&"a".repeat(5000)).unwrap());
    }
}
