"""Lua scripts of the Redis store. The server checks the fence when it writes, and writes once.

Each script answers {code, value}: DONE, STALE_EPOCH or LOST (value: the epoch of the store), ABSENT
(no such run), EXISTS (a run of that id exists).

KEYS[1] remembers a request for REMEMBERED_S seconds. A request that is sent again, since its answer
was lost, gets the first answer and changes nothing.
"""

from __future__ import annotations

DONE, STALE_EPOCH, ABSENT, EXISTS, LOST = range(5)

REMEMBERED_S = 600
"""How long a request is remembered. It is longer than any command is repeated."""

_ONCE = f"""
local known = redis.call('GET', KEYS[1])
if known then return {{{DONE}, known}} end
local function done(value)
  redis.call('SET', KEYS[1], value, 'EX', {REMEMBERED_S})
  return {{{DONE}, value}}
end
"""

# An epoch that the store has not given yet was given before the store lost its data.
_FENCE = f"""
local function refusal(epoch, key)
  if epoch == '' then return nil end
  local current = tonumber(redis.call('GET', key) or '0')
  if tonumber(epoch) < current then return {{{STALE_EPOCH}, current}} end
  if tonumber(epoch) > current then return {{{LOST}, current}} end
end
"""

CREATE_RUN = f"""{_ONCE}
if redis.call('EXISTS', KEYS[2]) == 1 then return {{{EXISTS}, 0}} end
for i = 1, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
return done('0')
"""

UPDATE_RUN = f"""{_ONCE}{_FENCE}
local refused = refusal(ARGV[1], KEYS[3])
if refused then return refused end
if redis.call('EXISTS', KEYS[2]) == 0 then return {{{ABSENT}, 0}} end
for i = 2, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
return done('0')
"""

NEXT_EPOCH = f"""{_ONCE}{_FENCE}
local refused = refusal(ARGV[1], KEYS[2])
if refused then return refused end
local given = math.max(tonumber(redis.call('GET', KEYS[2]) or '0') + 1, tonumber(ARGV[2]))
redis.call('SET', KEYS[2], string.format('%d', given))
return done(string.format('%d', given))
"""

APPEND = f"""{_ONCE}{_FENCE}
local refused = refusal(ARGV[1], KEYS[3])
if refused then return refused end
local bound = {{}}
if ARGV[2] ~= '' then bound = {{'MAXLEN', '=', ARGV[2]}} end
local words = {{'XADD', KEYS[2]}}
for _, word in ipairs(bound) do words[#words + 1] = word end
words[#words + 1] = '*'
for i = 3, #ARGV do words[#words + 1] = ARGV[i] end
return done(redis.call(unpack(words)))
"""

# The key of an entry is its request, and is remembered for good.
APPEND_JOURNAL = f"""{_FENCE}
local refused = refusal(ARGV[1], KEYS[2])
if refused then return refused end
local known = redis.call('HGET', KEYS[3], ARGV[2])
if known then return {{{DONE}, known}} end
local id = redis.call('XADD', KEYS[1], '*', 'entry', ARGV[3])
redis.call('HSET', KEYS[3], ARGV[2], id)
if KEYS[4] then redis.call('SET', KEYS[4], id) end
return {{{DONE}, id}}
"""

# One page of a stream, so that the server answers others in between. Removing again removes
# nothing. Answers with the id after which the next page begins, '' after the last.
REMOVE_LATER = f"""{_FENCE}
local refused = refusal(ARGV[1], KEYS[2])
if refused then return refused end
local start = '-'
if ARGV[3] ~= '' then start = '(' .. ARGV[3] end
local page = redis.call('XRANGE', KEYS[1], start, '+', 'COUNT', ARGV[4])
for _, entry in ipairs(page) do
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'step' and tonumber(entry[2][i + 1]) > tonumber(ARGV[2]) then
      redis.call('XDEL', KEYS[1], entry[1])
    end
  end
end
if #page < tonumber(ARGV[4]) then return {{{DONE}, ''}} end
return {{{DONE}, page[#page][1]}}
"""

# A value begins with the name of the process, whose length is that of ARGV[1]. Both scripts may be
# sent again: they set what is set already, and free what is free.
_HELD = """
local known = redis.call('GET', KEYS[1])
local is_others = known and string.sub(known, 1, #ARGV[1]) ~= ARGV[1]
"""

ENTER = f"""{_HELD}
if is_others then return {{{EXISTS}, known}} end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[2], ARGV[4])
return {{{DONE}, '0'}}
"""

TAKE_OUT = f"""{_HELD}
if known and not is_others then
  redis.call('DEL', KEYS[1])
  redis.call('SREM', KEYS[2], ARGV[2])
end
return {{{DONE}, '0'}}
"""
