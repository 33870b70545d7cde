//! Commands of clients that know the protocol and break every rule of it.

use super::siblings::Siblings;
use super::work::{SessionLimits, SessionResources, SharedDevice, Stopper};
use crate::convert::{JsonSubgraph, layout_to};
use crate::proto::{self, command::Command as Kind, failure::Code, result::Result as Outcome};
use prost::Message;
use samite_core::{CancelToken, DType, Device, Graph, Layout, Ledger};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use std::sync::{Arc, Weak};

struct Nobody;

impl Stopper for Nobody {
    fn begin(&self, _: &CancelToken, _: u64) {}
    fn end(&self) {}
}

const QUOTA: usize = 1 << 20;

pub(super) fn belongings(ledger: &Arc<Ledger>) -> SessionResources {
    let device: Arc<dyn Device> = ReferenceDevice::new(ReferenceOptions::default());
    let limits = SessionLimits {
        buffers: 8,
        graphs: 4,
        tensors: 64,
    };
    let devices: Arc<[SharedDevice]> = [SharedDevice::new(&device)].into();
    SessionResources::new(
        devices,
        Arc::clone(ledger),
        limits,
        None,
        Siblings {
            host: Weak::new(),
            owner: "x".into(),
            own: [0; 16],
        },
        [7; 32],
    )
}

fn layout(n: usize) -> Layout {
    Layout::contiguous(DType::F32, [n, 1, 1, 1]).unwrap()
}

fn place(buffer: u64, offset: u64, n: usize) -> Option<proto::Place> {
    Some(proto::Place {
        buffer,
        offset,
        layout: Some(layout_to(&layout(n))),
    })
}

fn allocate(buffer: u64, size: u64) -> Kind {
    Kind::Allocate(proto::Allocate {
        buffer,
        size,
        ..proto::Allocate::default()
    })
}

fn write(place: Option<proto::Place>, offset: u64, data: &[u8]) -> Kind {
    Kind::Write(proto::Write {
        place,
        offset,
        data: data.to_vec().into(),
    })
}

fn read(place: Option<proto::Place>, offset: u64, size: u64) -> Kind {
    Kind::Read(proto::Read {
        place,
        offset,
        size,
    })
}

/// Returns the command to prepare a graph that squares four numbers at these places.
fn prepare(graph: u64, places: Vec<Option<proto::Place>>) -> Kind {
    let mut g = Graph::new();
    let x = g.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
    let y = g.sqr(x).unwrap();
    Kind::Prepare(proto::Prepare {
        graph,
        device: 0,
        json: JsonSubgraph::new(&g, &[y]).json().into(),
        places: places.into_iter().map(Option::unwrap_or_default).collect(),
        workspace: None,
    })
}

fn run(graph: u64) -> Kind {
    Kind::Run(proto::Run { graph, deadline: 0 })
}

/// Returns the commands of a well-behaved client.
fn session() -> Vec<Kind> {
    let mut question = proto::SupportQuery::default();
    let mut g = Graph::new();
    let x = g.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
    let y = g.sqr(x).unwrap();
    question.json = JsonSubgraph::question(g.node(y), &|_| false).json().into();
    let size = proto::SupportQuery {
        kind: proto::support_query::Kind::Size.into(),
        layout: Some(layout_to(&layout(9))),
        ..proto::SupportQuery::default()
    };
    let bytes = [1f32, 2.0, 3.0, 4.0].map(f32::to_le_bytes).concat();
    vec![
        allocate(1, 64),
        allocate(2, 4096),
        Kind::Init(proto::Init {
            place: place(2, 0, 100),
            name: "w".into(),
            role: "vector".into(),
        }),
        Kind::Fill(proto::Fill {
            place: place(2, 0, 100),
            offset: 4,
            size: 100,
            value: 9,
        }),
        Kind::SupportQuery(question),
        Kind::SupportQuery(size),
        prepare(3, vec![place(1, 0, 4), place(1, 16, 4)]),
        write(place(1, 0, 4), 0, &bytes),
        run(3),
        read(place(1, 16, 4), 0, 16),
        Kind::Copy(proto::Copy {
            from: place(1, 16, 4),
            to: place(2, 800, 4),
        }),
        Kind::Chunk(proto::Chunk {
            place: place(2, 0, 4),
            size: 16,
            hash: blake3::hash(&bytes).as_bytes().to_vec().into(),
            data: bytes.into(),
            ..proto::Chunk::default()
        }),
        Kind::MemoryOf(0),
        Kind::Forget(3),
        Kind::Free(1),
    ]
}

fn commands(kinds: Vec<Kind>) -> Vec<proto::Command> {
    let command = |kind| proto::Command {
        command: Some(kind),
    };
    kinds.into_iter().map(command).collect()
}

fn done(belongings: &mut SessionResources, kinds: Vec<Kind>) -> Vec<proto::Result> {
    let (results, failure) = belongings.run(commands(kinds), &Nobody);
    assert_eq!(failure, None);
    results
}

#[track_caller]
fn refused(belongings: &mut SessionResources, kind: Kind) -> (Code, String) {
    let (results, failure) = belongings.run(commands(vec![kind]), &Nobody);
    assert_eq!(results, []);
    let failure = failure.expect("it is refused");
    (failure.code(), failure.text)
}

#[test]
fn a_valid_session_is_served() {
    let ledger = Ledger::new(Some(QUOTA));
    let mut mine = belongings(&ledger);
    let results = done(&mut mine, session());
    let bytes = results.iter().find_map(|result| match &result.result {
        Some(Outcome::Bytes(bytes)) => Some(bytes.to_vec()),
        _ => None,
    });
    assert_eq!(
        bytes,
        Some([1f32, 4.0, 9.0, 16.0].map(f32::to_le_bytes).concat())
    );
    drop(mine);
    assert_eq!(ledger.taken(), 0);
}

#[test]
fn protocol_violations_are_refused() {
    let ledger = Ledger::new(Some(QUOTA));
    let mut mine = belongings(&ledger);
    done(
        &mut mine,
        vec![
            allocate(1, 64),
            prepare(3, vec![place(1, 0, 4), place(1, 16, 4)]),
        ],
    );
    let wrong_dtype = Some(proto::Place {
        layout: Some(proto::Layout {
            dtype: "q4_0".into(),
            shape: vec![33, 1, 1, 1],
            strides: vec![18, 36, 36, 36],
        }),
        ..place(1, 0, 4).unwrap()
    });
    let overflowing = Some(proto::Place {
        layout: Some(proto::Layout {
            dtype: "f32".into(),
            shape: vec![(1 << 32) - 1, (1 << 30) + 1, 1, 1],
            strides: vec![(1 << 32) - 1, 12, 12, 12],
        }),
        ..place(1, 0, 4).unwrap()
    });
    let with_json = |json: &str| {
        Kind::Prepare(proto::Prepare {
            graph: 9,
            json: json.as_bytes().to_vec().into(),
            places: vec![place(1, 0, 4).unwrap(); 4],
            ..proto::Prepare::default()
        })
    };
    let invalid: Vec<(&str, Kind)> = vec![
        ("a buffer that is there", allocate(1, 16)),
        ("no such device", Kind::MemoryOf(1)),
        ("another's buffer", read(place(2, 0, 4), 0, 4)),
        ("behind the tensor", read(place(1, 0, 4), 1, 16)),
        ("behind the buffer", read(place(1, 52, 4), 0, 16)),
        (
            "an offset that overflows",
            read(place(1, u64::MAX, 4), 0, 4),
        ),
        ("a range that overflows", read(place(1, 0, 4), u64::MAX, 4)),
        ("a size that overflows", read(place(1, 0, 4), 4, u64::MAX)),
        ("a write behind the end", write(place(1, 0, 4), 13, &[0; 4])),
        ("no place", write(None, 0, &[0; 4])),
        ("parts of blocks", write(wrong_dtype, 0, &[0; 4])),
        ("bytes that overflow", write(overflowing, 0, &[0; 4])),
        (
            "copies of other layouts",
            Kind::Copy(proto::Copy {
                from: place(1, 0, 4),
                to: place(1, 0, 8),
            }),
        ),
        (
            "a value that is no byte",
            Kind::Fill(proto::Fill {
                place: place(1, 0, 4),
                value: 256,
                ..proto::Fill::default()
            }),
        ),
        (
            "a tensor between the places for tensors",
            Kind::Init(proto::Init {
                place: place(1, 4, 4),
                ..proto::Init::default()
            }),
        ),
        ("no such graph", run(4)),
        (
            "a graph that is there",
            prepare(3, vec![place(1, 0, 4), place(1, 16, 4)]),
        ),
        ("a node without a place", prepare(4, vec![place(1, 0, 4)])),
        (
            "a leaf without a place",
            prepare(4, vec![None, place(1, 16, 4)]),
        ),
        (
            "a place of another size",
            prepare(4, vec![place(1, 0, 4), place(1, 16, 8)]),
        ),
        (
            "a result behind the buffer",
            prepare(4, vec![place(1, 0, 4), place(1, 52, 4)]),
        ),
        (
            "a result over its operand",
            prepare(4, vec![place(1, 0, 4), place(1, 8, 4)]),
        ),
        ("a graph that is none", with_json("{}{")),
        ("a graph of nonsense", with_json("[1]")),
        ("deep nesting", with_json(&"[".repeat(10_000))),
        (
            "a node that reads itself",
            with_json(
                r#"[{"id":0,"name":"","op":"Sqr","sources":[0],"dtype":"f32","shape":[4,1,1,1],
                    "strides":[4,16,16,16],"roles":[]}]"#,
            ),
        ),
        (
            "an unknown operation",
            with_json(
                r#"[{"id":0,"name":"","op":"MapCustom","sources":[],"dtype":"f32",
                    "shape":[4,1,1,1],"strides":[4,16,16,16],"roles":[]}]"#,
            ),
        ),
        (
            "a hash of other bytes",
            Kind::Chunk(proto::Chunk {
                place: place(1, 0, 4),
                size: 16,
                hash: vec![0; 32].into(),
                data: vec![1; 16].into(),
                ..proto::Chunk::default()
            }),
        ),
        (
            "a short hash",
            Kind::Chunk(proto::Chunk {
                place: place(1, 0, 4),
                size: 16,
                hash: vec![0; 31].into(),
                ..proto::Chunk::default()
            }),
        ),
    ];
    for (what, kind) in invalid {
        let (code, text) = refused(&mut mine, kind);
        assert_eq!(code, Code::Invalid, "{what}: {text}");
        assert!(!text.is_empty(), "{what}");
    }
    let (code, _) = refused(&mut mine, allocate(2, QUOTA as u64));
    assert_eq!(code, Code::OutOfMemory);
    let (code, _) = refused(&mut mine, allocate(2, u64::MAX));
    assert_ne!(code, Code::Device);
    let empty = vec![proto::Command::default()];
    assert!(
        mine.run(empty, &Nobody).1.is_some(),
        "a command of the future"
    );
    done(
        &mut mine,
        vec![run(3), Kind::Free(1), run(3), Kind::Free(1)],
    );
    assert!(ledger.taken() > 0, "the graph holds its memory");
    done(&mut mine, vec![Kind::Forget(3), Kind::Forget(3)]);
    assert_eq!(ledger.taken(), 0);
}

/// Strides of 0 repeat four bytes 2⁵⁰ times, and an extent of 0 hides as many rows.
#[test]
fn tensors_with_excessive_repetition_are_refused() {
    let ledger = Ledger::new(Some(QUOTA));
    let mut mine = belongings(&ledger);
    done(&mut mine, vec![allocate(1, 64)]);
    let sum = |shape: [usize; 4]| {
        let layout = Layout::strided(DType::F32, shape, [0; 4]).unwrap();
        let json = serde_json::json!([
            {"id": 0, "name": "endless", "op": "Leaf", "sources": [], "dtype": "f32",
             "shape": shape, "strides": [0, 0, 0, 0], "roles": ["stored"]},
            {"id": 1, "name": "sum", "op": "Sum", "sources": [0], "dtype": "f32",
             "shape": [1, 1, 1, 1], "strides": [4, 4, 4, 4], "roles": ["output"]},
        ]);
        let whole = Some(proto::Place {
            layout: Some(layout_to(&layout)),
            ..place(1, 0, 1).unwrap()
        });
        let prepare = Kind::Prepare(proto::Prepare {
            graph: 9,
            json: json.to_string().into_bytes().into(),
            places: vec![whole.clone().unwrap(), place(1, 16, 1).unwrap()],
            ..proto::Prepare::default()
        });
        (prepare, whole)
    };
    for shape in [
        [1 << 50, 1, 1, 1],
        [1, 1 << 20, 1 << 20, 1 << 20],
        [1 << 50, 0, 1, 1],
    ] {
        let (prepare, whole) = sum(shape);
        let (code, text) = refused(&mut mine, prepare);
        assert_eq!(code, Code::Invalid);
        assert!(
            text.contains("'endless'") && text.contains("repeats its memory"),
            "{text}"
        );
        let copy = Kind::Copy(proto::Copy {
            from: whole.clone(),
            to: whole,
        });
        assert_eq!(refused(&mut mine, copy).0, Code::Invalid);
    }
    let (prepare, _) = sum([1000, 1, 1, 1]);
    let four = 4f32.to_le_bytes();
    let results = done(
        &mut mine,
        vec![
            write(place(1, 0, 1), 0, &four),
            prepare,
            run(9),
            read(place(1, 16, 1), 0, 4),
        ],
    );
    let bytes = Outcome::Bytes(4000f32.to_le_bytes().to_vec().into());
    assert_eq!(results[0].result, Some(bytes));
}

#[test]
fn mutated_sessions_do_not_affect_other_clients() {
    let ledger = Ledger::new(Some(QUOTA));
    let mut other = belongings(&ledger);
    done(
        &mut other,
        vec![allocate(1, 64), write(place(1, 0, 16), 0, &[5; 64])],
    );
    let good: Vec<Vec<u8>> = commands(session())
        .iter()
        .map(Message::encode_to_vec)
        .collect();
    // A fixed generator, so that failures are reproducible.
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state >> 11).unwrap() % below
    };
    let (mut served, mut failed) = (0, 0);
    for _ in 0..3000 {
        let mut mine = belongings(&ledger);
        let mut messages = good.clone();
        for _ in 0..1 + random(4) {
            let at = random(messages.len());
            match random(4) {
                0 => messages.swap(at, random(good.len())),
                1 => messages.push(good[random(good.len())].clone()),
                _ => {
                    let message = &mut messages[at];
                    if !message.is_empty() {
                        let byte = random(message.len());
                        message[byte] = [0, 1, 0x7f, 0x80, 0xff, b'9'][random(6)];
                    }
                }
            }
        }
        for message in messages {
            let Ok(command) = proto::Command::decode(&*message) else {
                failed += 1;
                continue;
            };
            match mine.run(vec![command], &Nobody).1 {
                None => served += 1,
                Some(_) => failed += 1,
            }
            assert!(ledger.taken() <= QUOTA);
        }
        drop(mine);
        assert_eq!(ledger.taken(), 64);
    }
    assert!(served > 1000 && failed > 1000, "{served} {failed}");
    let results = done(&mut other, vec![read(place(1, 0, 16), 0, 64)]);
    let bytes = Outcome::Bytes(vec![5; 64].into());
    assert_eq!(results[0].result, Some(bytes));
}
