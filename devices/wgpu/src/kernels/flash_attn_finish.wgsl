        // Writes the result of one query.
        let sink = {{sink}};
        let last = max(largest, sink);
        if is_masked(largest) {
            sum *= 0.0;
            total = 1.0;
        } else {
            let rescale = exp(largest - last);
            total = total * rescale + select(exp(sink - last), 0.0, is_masked(sink));
            sum *= rescale;
        }
        {{#j per_invocation}}
            if mine + {{j}}u < values.x {
                put_y(vec4<u32>(mine + {{j}}u, head, token, batch), {{element}} / total);
                {{keep_result}}
            }
        {{/j}}
