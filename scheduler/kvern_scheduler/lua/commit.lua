-- Applies one step's delta whole, and prolongs the lease.
-- KEYS  1 leader, 2 live, 3 recent, 4 instances, 10 adapters; prefixes: 5 request, 6 tokens, 7 index, 8 logprobs,
--       9 names
-- ARGV  1 epoch, 2 step, 3 digest, 4 lease in ms, 5 next request number
--       6 new tokens, (sequence number uint64, token int32) each: what `recent` gets at its end
--       7 '1': `recent` goes into the token logs. It is then, with what is new: 8 sequence numbers (uint64, request *
--         128 + choice), 9 tokens of each (uint32), 10 the tokens (int32), joined
--       then lists, each after its length: requests (number, record); log-probabilities
--       (number, choice, what to append); ends (number, choice, record, choices if the last or 0, seconds to retain,
--       name); gone instances; index entries (instance, blocks, generations, hashes);
--       at most one record of all adapters
-- Gives 1 OK, 2 DUP, -1 GAP, -2 FENCED
-- What can be done twice comes first, and the step last: a commit that an error ends has not been, and is repeated.
redis.register_function('kvern_commit' .. VERSION, function(keys, args)
  local leader, live, recent, instances = keys[1], keys[2], keys[3], keys[4]
  local request_key, tokens_key, index_key, logprobs_key, name_key = keys[5], keys[6], keys[7], keys[8], keys[9]
  local state = redis.call('HMGET', leader, 'epoch', 'step', 'digest', 'retained_ms')
  local step, last = tonumber(args[2]), tonumber(state[2] or 0)
  if state[1] ~= args[1] then return -2 end
  if step == last and state[3] == args[3] then return 2 end
  if step ~= last + 1 then return -1 end
  redis.call('STRLEN', recent) -- of another type, it is found out before anything is written
  local now = now_ms()
  local retained = tonumber(state[4] or 0)

  local at = 11
  local function each(width, apply)
    local count = tonumber(args[at])
    at = at + 1
    for _ = 1, count do
      apply(unpack(args, at, at + width - 1))
      at = at + width
    end
  end

  each(2, function(rid, record)
    redis.call('HSET', request_key .. rid, 'submit', record)
    redis.call('SADD', live, rid)
  end)

  each(3, function(rid, choice, packed)
    redis.call('APPEND', logprobs_key .. rid .. '.' .. choice, packed)
  end)

  each(6, function(rid, choice, record, choices, retain, name)
    redis.call('HSET', request_key .. rid, 'f' .. choice, record)
    if choices == '0' then return end
    redis.call('SREM', live, rid)
    local gone = {request_key .. rid}
    for c = 0, tonumber(choices) - 1 do
      gone[#gone + 1] = tokens_key .. rid .. '.' .. c
      gone[#gone + 1] = logprobs_key .. rid .. '.' .. c
    end
    if retain == '0' then
      redis.call('UNLINK', unpack(gone))
      return
    end
    for _, key in ipairs(gone) do redis.call('EXPIRE', key, retain) end
    redis.call('SET', name_key .. name, rid, 'EX', retain)
    local until_ms = now + 1000 * tonumber(retain)
    if until_ms > retained then
      retained = until_ms
      redis.call('HSET', leader, 'retained_ms', until_ms)
    end
  end)

  each(1, function(instance)
    for bucket = 0, tonumber(redis.call('HGET', instances, instance) or -1) do
      redis.call('UNLINK', index_key .. instance .. ':' .. bucket)
    end
    redis.call('HDEL', instances, instance)
  end)

  each(4, function(instance, blocks, generations, hashes)
    local highest = tonumber(redis.call('HGET', instances, instance) or -1)
    local reached = highest
    for i = 0, #blocks / 4 - 1 do
      local block = struct.unpack('<I4', blocks, 4 * i + 1)
      local bucket = math.floor(block / 1024)
      if bucket > reached then reached = bucket end
      redis.call('SETRANGE', index_key .. instance .. ':' .. bucket, 36 * (block % 1024),
        string.sub(generations, 4 * i + 1, 4 * i + 4) .. string.sub(hashes, 32 * i + 1, 32 * i + 32))
    end
    if reached > highest then redis.call('HSET', instances, instance, reached) end
  end)

  each(1, function(adapters) redis.call('SET', keys[10], adapters) end)

  if args[7] == '1' then
    local numbers, counts, tokens = args[8], args[9], args[10]
    local from = 1
    for i = 0, #counts / 4 - 1 do
      local number = struct.unpack('<I8', numbers, 8 * i + 1)
      local bytes = 4 * struct.unpack('<I4', counts, 4 * i + 1)
      local choice = number % 128
      local rid = (number - choice) / 128
      local left = redis.call('PTTL', request_key .. rid)
      if left ~= -2 then -- else it has ended, and nobody may ask for it any more
        local key = tokens_key .. rid .. '.' .. choice
        redis.call('APPEND', key, string.sub(tokens, from, from + bytes - 1))
        if left >= 0 then redis.call('PEXPIRE', key, left) end
      end
      from = from + bytes
    end
    redis.call('UNLINK', recent)
  elseif args[6] ~= '' then
    redis.call('APPEND', recent, args[6])
  end

  if args[5] ~= '0' then redis.call('HSET', leader, 'next_rid', args[5]) end
  redis.call('HSET', leader, 'step', args[2], 'digest', args[3], 'expiry_ms', now + tonumber(args[4]))
  return 1
end)
