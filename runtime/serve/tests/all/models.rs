//! Several models in one server: loading and eviction.

use crate::common::{Server, app, served};
use samite_requests::EngineOptions;
use samite_serve::{Hub, HubLimits, Loaded, ServeOptions, ServedModel, Source};
use samite_testing::wait_until;
use serde_json::{Value, json};
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A model whose plan needs this many bytes.
struct Planned {
    name: &'static str,
    bytes: u64,
    is_broken: bool,
    loads: Arc<AtomicUsize>,
}

impl Source for Planned {
    fn plan(&self) -> Result<u64, String> {
        match self.name {
            "worse" => Err("its header is damaged".to_owned()),
            _ => Ok(self.bytes),
        }
    }

    fn load(&self) -> Result<Loaded, String> {
        self.loads.fetch_add(1, Ordering::SeqCst);
        if self.is_broken {
            return Err("its file is damaged".to_owned());
        }
        let options = ServeOptions {
            aliases: vec![self.name.to_owned()],
            ..ServeOptions::default()
        };
        let (app, thread) = app(options, EngineOptions::default());
        Ok(Loaded {
            app,
            thread: Some(thread),
        })
    }
}

/// Starts a server with models `a`, `b` and `c`, which need 60, 40 and 50 of 100 bytes, one that
/// never fits, and one that is damaged. Also returns the load counter.
fn start(limits: HubLimits) -> (Server, Arc<AtomicUsize>) {
    let loads = Arc::new(AtomicUsize::new(0));
    let models = [
        ("a", 60),
        ("b", 40),
        ("c", 50),
        ("huge", 101),
        ("bad", 1),
        ("worse", 1),
    ];
    let models = models.map(|(name, bytes)| ServedModel {
        names: vec![name.to_owned(), format!("{name}.gguf")],
        path: PathBuf::from(format!("{name}.gguf")),
        source: Box::new(Planned {
            name,
            bytes,
            is_broken: name == "bad",
            loads: Arc::clone(&loads),
        }),
    });
    let limits = HubLimits {
        bytes: 100,
        ..limits
    };
    let options = served(ServeOptions::default());
    let hub = Hub::new(options, models.into(), limits, false).unwrap();
    (Server::with_hub(hub), loads)
}

fn ask(server: &Server, model: Option<&str>) -> (u16, Value) {
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2});
    if let Some(model) = model {
        body["model"] = model.into();
    }
    server.post("/v1/chat/completions", &body)
}

/// Returns the models in memory.
fn loaded(server: &Server) -> Vec<String> {
    let (_, list) = server.get("/v1/models");
    let models = list["data"].as_array().unwrap().iter();
    let models = models.filter(|model| model["status"]["value"] == "loaded");
    models
        .map(|model| model["id"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn requests_select_models_and_evict_the_least_recently_used() {
    let (server, loads) = start(HubLimits::default());
    assert!(loaded(&server).is_empty());
    // Without a name, the first model is used.
    for (name, id, there) in [
        (None, "a", &["a"][..]),
        (Some("b.gguf"), "b", &["a", "b"]),
        (Some("a:latest"), "a", &["a", "b"]),
        // `c` needs 50 bytes and `a` 60, which is too much. Evicting `b` first, which was unused
        // for longest, does not suffice.
        (Some("c"), "c", &["c"]),
        (Some("b"), "b", &["b", "c"]),
    ] {
        let (status, answer) = ask(&server, name);
        assert_eq!((status, &answer["model"]), (200, &json!(id)), "{answer}");
        assert_eq!(loaded(&server), there, "{name:?}");
    }
    assert_eq!(loads.load(Ordering::SeqCst), 4);
    let (_, list) = server.get("/v1/models");
    assert_eq!(list["data"].as_array().unwrap().len(), 6);
    assert_eq!(list["data"][0]["status"]["value"], "unloaded");
    assert_eq!(server.get("/v1/models/b").1["meta"]["n_embd"], 128);
}

#[test]
fn load_failures_explain_the_reason() {
    let (server, _) = start(HubLimits::default());
    let (status, answer) = ask(&server, Some("other"));
    let message = answer["error"]["message"].as_str().unwrap();
    assert_eq!(
        (status, &answer["error"]["type"]),
        (404, &json!("not_found_error"))
    );
    assert!(
        message.contains("other") && message.contains("a, b, c, huge, bad, worse"),
        "{message}"
    );
    let (status, answer) = ask(&server, Some("huge"));
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(
        status == 400 && message.contains("huge") && message.contains("--models-memory"),
        "{message}"
    );
    let (status, answer) = ask(&server, Some("bad"));
    assert!(
        status == 500
            && answer["error"]["message"]
                .as_str()
                .unwrap()
                .contains("damaged"),
        "{answer}"
    );
    assert_eq!(ask(&server, Some("worse")).0, 500);
    for name in ["bad", "worse"] {
        let (_, model) = server.get(&format!("/v1/models/{name}"));
        let error = model["status"]["error"].as_str().unwrap();
        assert!(
            model["status"]["failed"] == true && error.contains("damaged"),
            "{model}"
        );
    }
    let (status, answer) = server.post("/completion", &json!({"model": 5, "prompt": "a"}));
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("model")));
    // Other models are served.
    assert_eq!(ask(&server, Some("b")).0, 200);
}

#[test]
fn busy_models_are_not_evicted_and_others_wait() {
    let limits = HubLimits {
        models: 1,
        ..HubLimits::default()
    };
    let (server, loads) = start(limits);
    let endless = json!({"model": "a", "prompt": "Once", "stream": true, "ignore_eos": true,
        "n_predict": 600});
    let mut stream = server.send("POST", "/completion", "", &endless.to_string());
    stream.read_exact(&mut [0; 200]).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| ask(&server, Some("b")));
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(30) {
            assert!(!waiting.is_finished() || loaded(&server) == ["b"]);
        }
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        // It ran to its end.
        assert!(rest.contains("\"tokens_predicted\":600"), "{rest}");
        assert_eq!(waiting.join().unwrap().0, 200);
    });
    assert_eq!(loaded(&server), ["b"]);
    assert_eq!(loads.load(Ordering::SeqCst), 2);
}

#[test]
fn requests_for_models_that_do_not_fit_together_are_all_served() {
    let limits = HubLimits {
        models: 1,
        ..HubLimits::default()
    };
    let (server, _) = start(limits);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..24)
            .map(|i| {
                let server = &server;
                scope.spawn(move || {
                    let name = ["a", "b", "c"][i % 3];
                    (name, ask(server, Some(name)))
                })
            })
            .collect();
        for thread in threads {
            let (name, (status, answer)) = thread.join().unwrap();
            assert_eq!((status, &answer["model"]), (200, &json!(name)), "{answer}");
        }
    });
}

#[test]
fn models_are_loaded_and_unloaded_on_request() {
    let limits = HubLimits {
        loads: false,
        ..HubLimits::default()
    };
    let (server, _) = start(limits);
    assert_eq!(ask(&server, Some("a")).0, 400);
    let name = json!({"model": "a"});
    assert_eq!(server.post("/models/unload", &name).0, 400);
    assert_eq!(
        server.post("/models/load", &name),
        (200, json!({"success": true}))
    );
    assert_eq!(ask(&server, Some("a")).0, 200);
    assert_eq!(server.get("/props?model=a").0, 200);
    assert_eq!(server.get("/props?model=b").0, 400);
    assert_eq!(
        server.post("/models/unload", &name),
        (200, json!({"success": true}))
    );
    assert!(loaded(&server).is_empty());
    assert_eq!(server.post("/models/load", &json!({"model": "x"})).0, 404);
}

#[test]
fn ollama_keep_alive_sets_the_model_lifetime() {
    let (server, _) = start(HubLimits::default());
    let body = |name: &str, keep: Value| {
        let body = json!({"model": name, "prompt": "a", "stream": false, "keep_alive": keep,
            "options": {"num_predict": 1}});
        server.post("/api/generate", &body)
    };
    assert_eq!(body("a", json!(-1)).0, 200);
    assert_eq!(body("b", json!("20ms")).0, 200);
    wait_until("only the first model is loaded", || {
        loaded(&server) == ["a"]
    });
    let (_, running) = server.get("/api/ps");
    assert_eq!(running["models"].as_array().unwrap().len(), 1);
    assert_eq!(
        server.get("/api/tags").1["models"]
            .as_array()
            .unwrap()
            .len(),
        6
    );
    // Embeddings are not replaced by the answer that a model was unloaded.
    for (path, field) in [("/api/embed", "input"), ("/api/embeddings", "prompt")] {
        let (status, answer) =
            server.post(path, &json!({"model": "a", field: "", "keep_alive": 0}));
        assert_eq!(status, 501, "{answer}");
    }
    let (status, answer) = server.post("/api/generate", &json!({"model": "a", "keep_alive": 0}));
    assert_eq!(
        (status, &answer["done_reason"]),
        (200, &json!("unload")),
        "{answer}"
    );
    assert!(loaded(&server).is_empty());
    assert_eq!(body("a", json!("soon")).0, 400);
}
