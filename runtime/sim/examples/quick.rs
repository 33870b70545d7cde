use samite_sim::{run, Case};
fn main() {
    let args: Vec<u64> = std::env::args().skip(1).map(|a| a.parse().unwrap_or(0)).collect();
    let start = std::time::Instant::now();
    let (mut bad, mut steps, mut devs, mut strikes) = (0, 0, [0; 6], 0);
    for seed in args[0]..args[1] {
        let mut c = Case::new(seed); if args.len() > 2 { c.workload = if args[2] == 1 { samite_sim::Workload::Models } else { samite_sim::Workload::Graphs }; } let o = run(&c, args.len() > 3); if args.len() > 3 { println!("{}", o.trace.clone().unwrap()); }
        steps += o.steps; devs[o.devices] += 1; strikes += o.strikes.len();
        if let Some(f) = o.failure { bad += 1; if bad < 12 { println!("{seed}: {f} {:?}", o.strikes.iter().map(|s| s.to_string()).collect::<Vec<_>>()); } }
    }
    println!("{bad} bad, {steps} steps, devices {devs:?}, {strikes} strikes, {:?}", start.elapsed());
}
