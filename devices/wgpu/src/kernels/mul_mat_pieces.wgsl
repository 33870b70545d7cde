        {{#i pieces_a}} w{{i}} = halves(weights4(weights_row, k + 4u * {{i}}u));
        {{/i}}
