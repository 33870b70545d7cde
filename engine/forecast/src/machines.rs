//! Cluster file, which describes the machines.

use samite_core::{DType, Error, Result};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;
use std::sync::Arc;
use toml::Spanned;

/// Maximum number of machines in a file.
const MAX_MACHINES: usize = 4096;

/// A positive number.
#[derive(Clone, Copy, Debug)]
struct Positive(f64);

/// A non-negative number.
#[derive(Clone, Copy, Debug, Default)]
struct Seconds(f64);

impl<'de> Deserialize<'de> for Positive {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let number = f64::deserialize(from)?;
        if number.is_finite() && number > 0.0 {
            Ok(Positive(number))
        } else {
            Err(D::Error::custom("must be a number above 0"))
        }
    }
}

impl<'de> Deserialize<'de> for Seconds {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let number = f64::deserialize(from)?;
        if number.is_finite() && number >= 0.0 {
            Ok(Seconds(number))
        } else {
            Err(D::Error::custom("must be seconds: 0, or a number above it"))
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileForm {
    devices: BTreeMap<String, DeviceForm>,
    #[serde(default)]
    links: BTreeMap<String, LinkForm>,
    host: HostForm,
    machines: Vec<Spanned<MachineForm>>,
    exchange: Option<ExchangeForm>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceForm {
    memory: Positive,
    results: Positive,
    attention: Positive,
    operation: Seconds,
    types: BTreeMap<Spanned<String>, TypeForm>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TypeForm {
    read: Positive,
    products: Positive,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkForm {
    latency: Seconds,
    bandwidth: Positive,
    #[serde(default)]
    message: Seconds,
    #[serde(default)]
    shared: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HostForm {
    device: Spanned<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MachineForm {
    name: String,
    device: Spanned<String>,
    #[serde(default = "one")]
    count: Spanned<usize>,
    through: Option<AccessPath>,
    link: Option<Spanned<String>>,
}

fn one() -> Spanned<usize> {
    Spanned::new(0..0, 1)
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExchangeForm {
    link: Spanned<String>,
    algorithm: Algorithm,
}

/// Access of the program to a device of another machine or card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccessPath {
    /// A bus of the same machine, to a GPU with its own memory.
    Bus,
    /// ggml's RPC protocol: a message for each tensor written, each run, and each tensor read.
    Rpc,
    /// The remote mode: one message in each direction per step.
    Remote,
}

/// Exchange algorithm of the members of a split device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Algorithm {
    /// Each member sends its data to each other member, as samite's communicators do.
    Direct,
    /// Parts travel around a ring, twice for a sum.
    Ring,
    /// Pairs at distances of 1, 2, 4 and so on.
    Doubling,
}

/// Speed of a device with matrices of one type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TypeRates {
    /// Bytes of a matrix read per second in products with one column.
    pub read: f64,
    /// Multiply-adds per second in products with many columns.
    pub products: f64,
}

/// Speed of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceRates {
    /// Name in the file.
    pub name: String,
    /// Bytes of memory.
    pub memory: usize,
    /// Bytes of intermediate results read or written per second.
    pub results: f64,
    /// Multiply-adds of attention per second.
    pub attention: f64,
    /// Additional seconds per operation.
    pub operation: f64,
    /// Speed by matrix type.
    pub types: BTreeMap<DType, TypeRates>,
}

impl DeviceRates {
    /// Returns the rates of a type.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the file does not contain them.
    pub fn rates_for(&self, dtype: DType) -> Result<TypeRates> {
        self.types.get(&dtype).copied().ok_or_else(|| {
            Error::invalid(format!(
                "[devices.{0}] does not say how fast matrices of type {dtype} are: add [devices.{0}.types.{dtype}] with read and products",
                self.name
            ))
        })
    }
}

/// Link between machines.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    /// Name in the file.
    pub name: String,
    /// Latency of the smallest message in one direction, in seconds.
    pub latency: f64,
    /// Bytes per second.
    pub bandwidth: f64,
    /// Seconds that each end is busy with a message, whatever its size.
    pub message: f64,
    /// True if all messages share the bandwidth. Otherwise each machine has it in each direction.
    pub shared: bool,
}

/// One machine.
#[derive(Clone, Debug)]
pub struct Member {
    /// Name, with a number if there are several of a kind.
    pub name: String,
    /// Its device.
    pub device: Arc<DeviceRates>,
    /// Access of the program to it. `None` if it is a processor of the program's own machine, or
    /// runs the program itself.
    pub reached: Option<(AccessPath, Arc<Link>)>,
}

/// Exchange of the members of a split device.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// Link used.
    pub link: Arc<Link>,
    /// Algorithm used.
    pub algorithm: Algorithm,
}

/// Machines and the links between them.
#[derive(Clone, Debug)]
pub struct Cluster {
    /// Processor of the program's machine, which computes whatever the others cannot.
    pub host: Arc<DeviceRates>,
    /// The machines, in order of preference.
    pub members: Vec<Member>,
    /// Exchange of the machines, if tensors are split.
    pub exchange: Option<Exchange>,
}

/// Text of a file, for line numbers.
struct SourceText<'a> {
    file: &'a str,
    text: &'a str,
}

impl SourceText<'_> {
    fn wrong(&self, at: usize, message: impl std::fmt::Display) -> Error {
        let before = self.text.get(..at).unwrap_or(self.text);
        let line = before.matches('\n').count();
        let text = self.text.lines().nth(line).unwrap_or("").trim();
        let shown = match text {
            "" => String::new(),
            text => format!(" (`{text}`)"),
        };
        Error::invalid(format!(
            "{}, line {}{shown}: {message}",
            self.file,
            line + 1
        ))
    }
}

fn named<'m, T>(
    source: &SourceText<'_>,
    map: &'m BTreeMap<String, Arc<T>>,
    kind: &str,
    name: &Spanned<String>,
) -> Result<&'m Arc<T>> {
    map.get(name.get_ref()).ok_or_else(|| {
        let known: Vec<_> = map.keys().map(|name| format!("[{kind}.{name}]")).collect();
        let known = if known.is_empty() {
            "nothing".to_owned()
        } else {
            known.join(", ")
        };
        source.wrong(
            name.span().start,
            format_args!(
                "there is no [{kind}.{}]; the file has {known}",
                name.get_ref()
            ),
        )
    })
}

impl Cluster {
    /// Parses the text of a file called `file`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with the invalid line, and what is expected there.
    pub fn parse(file: &str, text: &str) -> Result<Self> {
        let source = SourceText { file, text };
        let form: FileForm = toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(text.len(), |span| span.start);
            source.wrong(at, error.message())
        })?;
        let mut devices = BTreeMap::new();
        for (name, device) in form.devices {
            let mut types = BTreeMap::new();
            for (dtype, TypeForm { read, products }) in device.types {
                let rates = TypeRates {
                    read: read.0,
                    products: products.0,
                };
                let known = DType::from_name(dtype.get_ref()).ok_or_else(|| {
                    let message = format!(
                        "'{}' is not a type of matrices; q4_0, f16 and f32 are",
                        dtype.get_ref()
                    );
                    source.wrong(dtype.span().start, message)
                })?;
                types.insert(known, rates);
            }
            let rates = DeviceRates {
                memory: device.memory.0 as usize,
                results: device.results.0,
                attention: device.attention.0,
                operation: device.operation.0,
                types,
                name: name.clone(),
            };
            devices.insert(name, Arc::new(rates));
        }
        let links: BTreeMap<_, _> = form
            .links
            .into_iter()
            .map(|(name, link)| {
                let link = Link {
                    name: name.clone(),
                    latency: link.latency.0,
                    bandwidth: link.bandwidth.0,
                    message: link.message.0,
                    shared: link.shared,
                };
                (name, Arc::new(link))
            })
            .collect();
        let mut members: Vec<Member> = Vec::new();
        for machine in form.machines {
            let at = machine.span().start;
            let machine = machine.into_inner();
            let device = named(&source, &devices, "devices", &machine.device)?;
            let reached = match (machine.through, &machine.link) {
                (None, None) => None,
                (Some(through), Some(link)) => {
                    Some((through, Arc::clone(named(&source, &links, "links", link)?)))
                }
                _ => {
                    let message = format!(
                        "machine '{}' needs both `through` (bus, rpc or remote) and `link`, or neither",
                        machine.name
                    );
                    return Err(source.wrong(at, message));
                }
            };
            let count = *machine.count.get_ref();
            if count == 0 || count > MAX_MACHINES {
                let message = format!("count must be from 1 to {MAX_MACHINES}");
                return Err(source.wrong(machine.count.span().start, message));
            }
            for number in 0..count {
                let name = match count {
                    1 => machine.name.clone(),
                    _ => format!("{}{number}", machine.name),
                };
                let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
                if name.is_empty() || !name.chars().all(is_plain) {
                    return Err(
                        source.wrong(at, "a machine's name is made of letters, digits, - and _")
                    );
                }
                let same = |other: &Member| other.name.eq_ignore_ascii_case(&name);
                if members.iter().any(same) || name.eq_ignore_ascii_case("cpu") {
                    let message =
                        format!("two machines are called '{name}', or one like the host's `cpu`");
                    return Err(source.wrong(at, message));
                }
                members.push(Member {
                    name,
                    device: Arc::clone(device),
                    reached: reached.clone(),
                });
            }
        }
        if members.is_empty() || members.len() > MAX_MACHINES {
            let message = format!("there must be 1 to {MAX_MACHINES} machines");
            return Err(source.wrong(text.len(), message));
        }
        let exchange = form
            .exchange
            .map(|form| {
                Result::Ok(Exchange {
                    link: Arc::clone(named(&source, &links, "links", &form.link)?),
                    algorithm: form.algorithm,
                })
            })
            .transpose()?;
        Ok(Cluster {
            host: Arc::clone(named(&source, &devices, "devices", &form.host.device)?),
            members,
            exchange,
        })
    }

    /// Returns the index of the machine with this name in plans.
    pub(crate) fn member(&self, name: &str) -> Option<usize> {
        self.members.iter().position(|member| member.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
[devices.small]
memory = 8e9
results = 10e9
attention = 20e9
operation = 1e-6
[devices.small.types.q4_0]
read = 20e9
products = 200e9

[links.lan]
latency = 50e-6
bandwidth = 117e6

[host]
device = "small"

[[machines]]
name = "node"
device = "small"
count = 3
through = "remote"
link = "lan"

[exchange]
link = "lan"
algorithm = "ring"
"#;

    #[test]
    fn a_cluster_file_is_parsed() {
        let cluster = Cluster::parse("m.toml", GOOD).unwrap();
        let names: Vec<_> = cluster.members.iter().map(|m| &*m.name).collect();
        assert_eq!(names, ["node0", "node1", "node2"]);
        let device = &cluster.members[2].device;
        assert_eq!((device.memory, device.operation), (8_000_000_000, 1e-6));
        assert_eq!(device.rates_for(DType::Q4_0).unwrap().products, 200e9);
        let (through, link) = cluster.members[0].reached.as_ref().unwrap();
        assert_eq!((*through, link.bandwidth), (AccessPath::Remote, 117e6));
        assert_eq!(cluster.exchange.unwrap().algorithm, Algorithm::Ring);
        let missing = device.rates_for(DType::F16).unwrap_err().to_string();
        assert!(missing.contains("[devices.small.types.f16]"), "{missing}");
    }

    #[test]
    fn cluster_file_errors_name_the_line() {
        for (from, to, line, says) in [
            ("latency = 50e-6", "latency = -1", 12, "must be seconds"),
            ("read = 20e9", "read = 0", 8, "must be a number above 0"),
            ("read = 20e9", "read = nan", 8, "must be a number above 0"),
            ("read = 20e9", "read = \"fast\"", 8, "invalid type"),
            ("read = 20e9", "reed = 20e9", 8, "unknown field `reed`"),
            ("types.q4_0", "types.q9_0", 7, "'q9_0' is not a type"),
            (
                "link = \"lan\"\n\n",
                "link = \"wan\"\n\n",
                23,
                "there is no [links.wan]; the file has [links.lan]",
            ),
            (
                "device = \"small\"\n\n",
                "device = \"big\"\n\n",
                16,
                "there is no [devices.big]",
            ),
            (
                "through = \"remote\"",
                "through = \"smoke\"",
                22,
                "unknown variant `smoke`",
            ),
            ("through = \"remote\"", "", 18, "needs both `through`"),
            ("count = 3", "count = 0", 21, "count must be from 1"),
            ("count = 3", "count = 5000", 21, "count must be from 1"),
            ("name = \"node\"", "name = \"a,b\"", 18, "letters, digits"),
            (
                "algorithm = \"ring\"",
                "algorithm = \"star\"",
                27,
                "unknown variant `star`",
            ),
            ("[host]\ndevice = \"small\"", "", 1, "missing field `host`"),
            ("results = 10e9\n", "", 2, "missing field `results`"),
            ("memory = 8e9", "memory = ", 3, ""),
        ] {
            let text = GOOD.replacen(from, to, 1);
            assert_ne!(text, GOOD, "{from}");
            let error = Cluster::parse("m.toml", &text).unwrap_err().to_string();
            assert!(
                error.contains(&format!("m.toml, line {line}")),
                "{to}: {error}"
            );
            assert!(error.contains(says), "{to}: {error}");
            assert!(!error.contains('\n'), "{error}");
        }
        let twice = format!("{GOOD}\n[[machines]]\nname = \"node1\"\ndevice = \"small\"\n");
        let error = Cluster::parse("m.toml", &twice).unwrap_err().to_string();
        assert!(error.contains("two machines are called 'node1'"), "{error}");
    }
}
