//! Engine features over HTTP: adapters for each request, and a draft model.

use crate::common::{CONTEXT, Server, engine, model};
use samite_core::Environment;
use samite_gguf::GgufFile;
use samite_llm::{Adapter, Context, ContextOptions, Model, ModelOptions, SyntheticAdapter};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_requests::{Drafter, EngineOptions};
use samite_serve::ServeOptions;
use samite_testing::wait_until;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::Read;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Returns the model on a device whose results for a row do not depend on the batch.
fn exact() -> &'static Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    MODEL.get_or_init(|| {
        let file = GgufFile::from_static("stories", samite_stories::MODEL).unwrap();
        let device = ReferenceDevice::new(ReferenceOptions::named("exact"));
        Model::from_gguf(&file, &ModelOptions::new(vec![device])).unwrap()
    })
}

/// Returns two adapters of the model.
fn adapters() -> Vec<(Arc<Adapter>, f32)> {
    static ADAPTERS: OnceLock<[Arc<Adapter>; 2]> = OnceLock::new();
    let adapters = ADAPTERS.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.gguf");
        std::fs::write(&file, samite_stories::MODEL).unwrap();
        [2, 5].map(|rank| {
            let path = folder.path().join(format!("{rank}.gguf"));
            let mut number = rank as f32;
            let next = || {
                number += 1.0;
                number.sin() * 0.2
            };
            let synthetic = SyntheticAdapter { rank, alpha: 0.0 };
            synthetic.write(&file, &path, |_| true, next).unwrap();
            Adapter::load(&path, exact()).unwrap()
        })
    });
    let unused = |adapter: &Arc<Adapter>| (Arc::clone(adapter), 0.0);
    adapters.iter().map(unused).collect()
}

fn asked(lora: &Value) -> Value {
    json!({"prompt": "Once upon a time", "n_predict": 40, "temperature": 0, "ignore_eos": true,
        "lora": lora})
}

#[test]
fn concurrent_requests_use_their_own_adapters() {
    let wishes = [
        json!([]),
        json!([{"id": 0, "scale": 1}]),
        json!([{"id": 1, "scale": 1}]),
        json!([{"id": 0, "scale": 0.5}, {"id": 1, "scale": -1}]),
    ];
    let options = ServeOptions {
        adapters: adapters(),
        ..ServeOptions::default()
    };
    let plain = Environment::system();
    let engine = engine(exact(), EngineOptions::default(), plain);
    let server = Server::with(options, engine);
    let alone: Vec<Value> = wishes
        .iter()
        .map(|lora| {
            let (status, answer) = server.post("/completion", &asked(lora));
            assert_eq!(status, 200, "{answer}");
            answer["content"].clone()
        })
        .collect();
    let texts: BTreeSet<String> = alone.iter().map(Value::to_string).collect();
    assert_eq!(texts.len(), wishes.len(), "adapters change nothing");
    let mut streams = Vec::new();
    for lora in &wishes {
        streams.push(server.send("POST", "/completion", "", &asked(lora).to_string()));
    }
    let is_busy = |slot: &Value| slot["is_processing"] == json!(true);
    wait_until("all are computed at the same time", || {
        let (_, slots) = server.get("/slots");
        slots.as_array().unwrap().iter().all(is_busy)
    });
    let (_, metrics) = server.get("/metrics");
    let metrics = metrics.as_str().unwrap();
    let running = r#"{max_lora="2",running_lora_adapters="2,5",waiting_lora_adapters=""} "#;
    assert!(
        metrics.contains(&format!("lora_requests_info{running}")),
        "{metrics}"
    );
    // Meanwhile, the slots show the settings of each.
    let (_, slots) = server.get("/slots");
    for slot in slots
        .as_array()
        .unwrap()
        .iter()
        .filter(|slot| is_busy(slot))
    {
        assert_eq!(slot["params"]["n_predict"], 40, "{slot}");
    }
    for (mut stream, expected) in streams.into_iter().zip(&alone) {
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let (_, body) = text.split_once("\r\n\r\n").unwrap();
        let answer: Value = serde_json::from_str(body).unwrap();
        assert_eq!(&answer["content"], expected);
    }
    // An adapter can also be requested by its name in the field `model`.
    let (_, models) = server.get("/v1/models");
    assert_eq!(models["data"][2]["id"], "5", "{models}");
    assert_eq!(models["data"][2]["parent"], models["data"][0]["id"]);
    assert_eq!(server.get("/v1/models/5").1, models["data"][2]);
    let mut named = asked(&Value::Null);
    named.as_object_mut().unwrap().remove("lora");
    named["model"] = json!("5");
    let (_, answer) = server.post("/completion", &named);
    assert_eq!(
        (&answer["content"], &answer["model"]),
        (&alone[2], &json!("5"))
    );
    // The defaults for requests that name no adapters are separate.
    let shares = json!([{"id": 1, "scale": 1}]);
    assert_eq!(server.post("/lora-adapters", &shares).0, 200);
    let mut silent = asked(&Value::Null);
    silent.as_object_mut().unwrap().remove("lora");
    assert_eq!(server.post("/completion", &silent).1["content"], alone[2]);
}

fn ticking(step: Duration) -> Environment {
    Environment {
        clock: samite_testing::ticking(step),
        ..Environment::system()
    }
}

#[test]
fn a_draft_model_changes_no_answer() {
    let server = Server::simple();
    let options = EngineOptions {
        draft: 8,
        ..EngineOptions::default()
    };
    // Engine steps seem slow and those of the draft model fast, so drafting pays off.
    let mut engine = engine(model(), options.clone(), ticking(Duration::from_millis(1)));
    let context = ContextOptions {
        n_ctx: Some((CONTEXT + 8) * options.slots),
        n_seq: options.n_seq(),
        environment: ticking(Duration::from_micros(1)),
        ..ContextOptions::default()
    };
    let draft = Context::new(Arc::clone(model()), context).unwrap();
    engine
        .set_drafter(Drafter::new(draft, model(), 0.0).unwrap())
        .unwrap();
    let drafting = Server::with(ServeOptions::default(), engine);
    let asked = |temperature: f64, stream: bool| {
        json!({
            "messages": [{"role": "user", "content": "Tell me about a dog"}],
            "max_tokens": 60, "temperature": temperature, "seed": 7, "stream": stream,
            "stop": ["\n\n"], "repeat_penalty": 1.2,
        })
    };
    let mut drafted = 0;
    for temperature in [0.0, 1.0] {
        let (_, plain) = server.post("/v1/chat/completions", &asked(temperature, false));
        let (status, answer) = drafting.post("/v1/chat/completions", &asked(temperature, false));
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["choices"], plain["choices"]);
        let count = |name: &str| answer["timings"][name].as_u64().unwrap_or(0);
        assert!(count("draft_n_accepted") <= count("draft_n"));
        drafted += count("draft_n_accepted");
        let body = asked(temperature, true).to_string();
        let (_, _, stream) = drafting.ask("POST", "/v1/chat/completions", "", &body);
        let data = stream
            .lines()
            .filter_map(|line| line.strip_prefix("data: "));
        let parts = data.filter_map(|data| {
            let event: Value = serde_json::from_str(data).ok()?;
            Some(event["choices"][0]["delta"]["content"].as_str()?.to_owned())
        });
        assert_eq!(
            parts.collect::<String>(),
            plain["choices"][0]["message"]["content"].as_str().unwrap()
        );
    }
    assert!(drafted > 20, "{drafted} drafted tokens stood");
}
