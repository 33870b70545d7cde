        // Stores the partial result of one of several workgroups of a query.
        let at = number * ((values.x + 3u) / 4u * 4u + 2u);
        if local == 0u {
            put_w(vec4<u32>(at, 0u, 0u, 0u), largest);
            put_w(vec4<u32>(at + 1u, 0u, 0u, 0u), total);
        }
        {{#j per_invocation}}
            put_w(vec4<u32>(at + 2u + mine + {{j}}u, 0u, 0u, 0u), {{element}});
        {{/j}}
